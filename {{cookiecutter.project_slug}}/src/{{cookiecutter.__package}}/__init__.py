"""{{ cookiecutter.__description_quoted }}"""

import time

# The clock of "first step after ... s": read before anything heavy is imported.
STARTED = time.perf_counter()
