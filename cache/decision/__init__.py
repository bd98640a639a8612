"""May a cached answer be served? From texts and similarities to a decision with its reasons.

Pure: no Redis, no index, no encoder. Must not import any room but the values at the top of the
package. Read `rule.py` first; docs/semantic-cache.md follows the error bound through the files.
"""
