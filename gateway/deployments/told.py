"""What each worker tells all others about one thing: a hash in Redis, by worker when and what.

Scripts behind `TOLD` have one form: KEYS[1] the hash; ARGV[1] the worker, ARGV[2] how long a
word counts in ms. They have `now` in Redis' ms, `others` (what other workers told within that time)
and `mine` (what this one told before, or nil), and call `tell`. Knows no deployments. Invariant: a
worker that has ended counts no longer than its last word.
"""

from hashlib import blake2b

TOLD = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local told, others, mine = redis.call('HGETALL', KEYS[1]), {}, nil
for i = 1, #told, 2 do
  local at, words = string.match(told[i + 1], '^(%d+) (.*)$')
  if not at or math.abs(now - at) > tonumber(ARGV[2]) then redis.call('HDEL', KEYS[1], told[i])
  elseif told[i] == ARGV[1] then mine = words else others[#others + 1] = words end
end
local function tell(words)
  redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. words)
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
"""


def digest_of(name: str) -> str:
    """A deployment's name as part of a key."""
    return blake2b(name.encode(), digest_size=8).hexdigest()
