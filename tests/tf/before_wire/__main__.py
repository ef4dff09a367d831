import sys

from tests.tf.before_wire import record

record(sys.argv[1])
