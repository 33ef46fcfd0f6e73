"""What is given, looked at before it is used: numbers, kinds, JSON; a refusal names field, value and what is allowed."""
