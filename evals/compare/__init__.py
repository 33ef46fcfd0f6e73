"""Methods side by side: the main table and the leaderboard."""
