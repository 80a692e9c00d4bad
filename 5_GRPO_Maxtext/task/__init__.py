"""Questions and what an answer earns: reading data, prompts, rewards, graders."""
