"""Layer 8: the command line. Each command calls one function of a lower package and imports it when it runs."""

ERRORS = 1  # some lines of a job, or a policy file, have errors
REFUSED = 2  # with one line of reason
INTERNAL = 70
STORAGE = 74  # a disk is full or fails
INTERRUPTED = 130
PIPE_CLOSED = 141  # by the reader of the output
