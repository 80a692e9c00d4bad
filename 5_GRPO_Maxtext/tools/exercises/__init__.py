"""What stands beside exercises.py: the grader, the usual mistakes, a training with your functions."""
