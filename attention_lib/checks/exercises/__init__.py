"""One module for each exercise notebook, each with its list QUESTIONS."""
