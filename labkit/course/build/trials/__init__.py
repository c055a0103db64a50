"""What the examiner and the ranks load for an answer: `draw` draws the inputs, `expect` says what a single device and
common mistakes make of them, and a function with the name of the trial calls the answer. A loader of lab 09 is observed
in plain processes instead."""
