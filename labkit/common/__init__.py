"""What every room uses: checks of arguments (`arguments`), text made safe to show (`text`), numbers in words (`units`),
processes and whose they are (`processes`).

It never imports another room.
"""
