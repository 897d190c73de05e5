"""One module for each notebook, each with its list QUESTIONS."""
