"""Weights from the actor to the engines: each way is a class with a sender and a receiver (gkd.weights.transfer)."""
