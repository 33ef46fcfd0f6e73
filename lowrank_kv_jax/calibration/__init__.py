"""What is learnt of a model before it is served: corpus, moments, Fisher information, votes."""
