"""Tools you can skip on a first reading; `python tool.py` lists them."""
