"""`python -m cache.worker`: one cache worker, until SIGTERM or its parent's end."""

import logging
import os

from cache.worker.worker import main

if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # a model may still be loading in the thread, which the interpreter would wait for
    os._exit(status)
