"""Several processes for one conversion: own workers, the ranks of a torchrun job, three engines.

Who writes which bytes is decided here; what the bytes are is planned elsewhere. Importing this
package imports neither torch nor numpy.
"""
