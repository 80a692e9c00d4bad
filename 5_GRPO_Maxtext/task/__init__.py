"""Questions and rewards: reading data, prompts, reward functions, graders."""
