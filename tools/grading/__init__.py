"""Grading without trusting the process that ran the student's code.

submissions   find the files in a folder of submissions, and read them without harm
bookkeeping   nbgrader: the gradebook, checks put back, autograded notebooks
pages         what the student may see: nbgrader's feedback page, without scripts
judge         one submission: its cells in a worker, its checks on this side
remote        this side of the worker: functions to call in it, an HBM it has to ask for
sandbox       how the worker is started: bubblewrap and limits
worker        the process that runs the student's code
wire          what crosses between the two: JSON and plain array bytes, never pickle
"""
