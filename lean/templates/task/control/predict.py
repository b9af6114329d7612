            outputs = self.task.play(self.parallel.predict, inputs)
