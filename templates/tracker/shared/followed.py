#:: extends "tracker/shared/tracker.py" ::#
#// What a tracking service adds to the tracker; the class around the blocks only shows where they belong. //#

#:: block imports ::#
from .follow import Follower
#:: endblock ::#

class Tracker:
    def __init__(self) -> None:
        #:: block attributes ::#
        self.step = 0
        #:: endblock ::#

    def record(self, done: int) -> Iterator[None]:
            #:: block open ::#
            self.step, follower = done, stack.enter_context(Follower(self.run_dir))
            #:: endblock ::#
            #:: block close ::#
            follower.end("finished" if total is None or self.step >= total else "stopped")
            #:: endblock ::#

    def log(self, record: dict[str, Any]) -> None:
        #:: block log ::#
        self.step = record["step"]
        #:: endblock ::#
