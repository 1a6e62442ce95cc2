"""Client processes that write down what they see, and what they are made of."""
