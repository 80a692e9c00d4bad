"""Runs the programs that a model writes: `box` starts them, `warden` isolates them, `calls` tests
them.
"""
