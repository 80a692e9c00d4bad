"""Support for exercises.py: the grader, the usual mistakes, a training run with your functions."""
