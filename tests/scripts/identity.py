"""Says what a script can see of the way it was started, and leaves things to be done at its end."""

import atexit
import gzip
import pickle
import sys
import threading
import time


class Thing:
    pass


def late():
    time.sleep(0.3)
    print("thread", pickle.loads(pickle.dumps(Thing())).__class__.__module__)


print(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0], sys.modules["__main__"].Thing is Thing)
atexit.register(print, "at exit")
threading.Thread(target=late).start()
text = open(sys.argv[1] + "/left.txt", "w")  # noqa: SIM115 - left open on purpose
text.write("not yet flushed")
packed = gzip.open(sys.argv[1] + "/left.gz", "wt")  # noqa: SIM115
packed.write("not yet packed")
sys.exit(int(sys.argv[2]))
