#:: extends "tracker/shared/tracker.py" ::#
