#:: extends "tracker/shared/tracker.py" ::#
#// What a tracking service adds to the tracker; the class around the blocks only shows where they belong. //#

#:: block imports ::#
from .follow import Follower
#:: endblock ::#

class Tracker:
    def __init__(self) -> None:
        #:: block attributes ::#
        self.outcome = "stopped"
        #:: endblock ::#

    def record(self) -> Iterator[None]:
            #:: block open ::#
            follower = stack.enter_context(Follower(self.run_dir))
            #:: endblock ::#
            #:: block close ::#
            follower.end(self.outcome)
            #:: endblock ::#

    def finish(self, examples: Examples) -> None:
        #:: block finish ::#
        self.outcome = "finished"
        #:: endblock ::#
