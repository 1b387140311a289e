"""What is measured on questions that nothing is learned from, and what follows from it."""
