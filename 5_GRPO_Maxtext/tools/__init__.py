"""What a first reading does not need; `python tool.py` lists it."""
