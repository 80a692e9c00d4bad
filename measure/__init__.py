"""What is measured for the pages: the runner, the lock, the tables, the pictures."""
