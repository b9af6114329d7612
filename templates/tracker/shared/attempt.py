def attempt(self, action: Any) -> None:
    """Send something, unless that has failed before."""
    try:
        if not self.has_failed:
            action()
    except Exception as error:
        self.has_failed = True
        print(f"warning: {{ service }} has failed ({error!r}); the next start sends what it lacks", file=sys.stderr)
