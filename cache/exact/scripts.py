"""The Lua scripts that change an entry and its accounting together, for Redis 6.2 to 8.

Each script is atomic in Redis. `cache.exact.store` passes the keys and reads the replies. KEYS 1 to
8 are one partition's entries, about, used, expires, bytes, vectors, groups, words. Invariants:
`bytes` is the sum of the sizes in `about`; a pointer in `words` is removed with its entry.

A pointer is the name of an answer (16 bytes of its entry and 8 of its time), the name of its group
(zeros: does not matter), and the encoding of `cache.exact.pointers`. An entry's keys in `words` are
listed at its id and `p`.
"""

# One function for all scripts: forget an entry and give its bytes back. Sizes are the first 10
# digits of `about`.
_FORGET = """
local entries, about, used, expires, bytes, vectors = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local groups, words = KEYS[7], KEYS[8]
local function forget(id)
  local listed = redis.call('HGET', words, id .. 'p')
  if listed then
    for at = 1, #listed, 16 do
      local key = string.sub(listed, at, at + 15)
      local pointer = redis.call('HGET', words, key)
      if pointer and string.sub(pointer, 1, 16) == id then redis.call('HDEL', words, key) end
    end
    redis.call('HDEL', words, id .. 'p')
  end
  local known = redis.call('HGET', about, id)
  redis.call('HDEL', entries, id)
  redis.call('ZREM', used, id)
  redis.call('ZREM', expires, id)
  redis.call('HDEL', groups, id)
  redis.call('HDEL', vectors, id .. 'a')
  if not known then return 0 end
  redis.call('HDEL', about, id)
  local size = tonumber(string.sub(known, 1, 10))
  redis.call('DECRBY', bytes, size)
  return size
end
"""

# When an entry counts as used, on the scale of `used`: milliseconds. Each use adds what a hit saves
# for a byte, and that halves with every half-life. What an entry has, as S = now + half_life
# log2(sum), orders entries alike at every later moment, for all of them fade alike: nothing is ever
# scored anew, and what has least is found in O(log n). (LRFU, Lee et al., IEEE Transactions on
# Computers 50(12), 2001, weighed by saving over size as in GreedyDual-Size, Cao and Irani, USITS
# 1997.)
# decision: eviction-by-worth
_USED_AT = """
local function used_at(score, now, half_life, worth)
  worth = tonumber(worth)
  if score then worth = worth + 2 ^ ((tonumber(score) - now) / half_life) end
  return string.format('%.0f', now + half_life * math.log(worth) / math.log(2))
end
"""

# KEYS: used. ARGV: now_ms, half_life_ms, then pairs of exact and the worth of its uses. What is
# gone stays gone.
TOUCH = (
    _USED_AT
    + """
local now, half_life = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score then redis.call('ZADD', KEYS[1], used_at(score, now, half_life, ARGV[i + 1]), ARGV[i]) end
end
return 1
"""
)

# Stores entries, one after the other. ARGV: now_ms, size_max, 1 where the partition is listed,
# warm_ttl_ms, half_life_ms; then of each entry: exact, entry, about, its terms, the key of its words
# and the pointer (or empty). The terms, with blanks between: expires_ms, worth, warm links, claims,
# warm. KEYS from 9: the warm links of each entry, and the claim that ends. Answers {}, and does nothing, where the
# partition is new and not said to be listed; else for each entry {what became of it, evicted...}: 1 it
# took the place of another, 0 it did not, -1 a curated one stays, -2 the curated ones leave no room.
# A curated entry has the worth `-` and no place in `used`: it is never evicted, nor replaced but by its like.
# The vector of a replaced entry stays: the same exact key means the same text. Its group and its
# sketch go: they were its answer's. The keys' own expiry is a little behind the last entry's, so that it is moved
# seldom; keys that begin anew have none until then.
PUT = (
    _FORGET
    + _USED_AT
    + """
local now, size_max, half_life = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[5])
if ARGV[3] == '0' and redis.call('EXISTS', about) == 0 then return {} end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', expires, '-inf', ARGV[1], 'LIMIT', 0, 64)) do
  forget(gone)
  redis.call('HDEL', vectors, gone)
end
local replies, link, last = {}, 9, 0
for a = 6, #ARGV, 5 do
  local id, size, reply = ARGV[a], tonumber(string.sub(ARGV[a + 2], 1, 10)), {0}
  local expires_ms, worth, links, claims, warm = string.match(ARGV[a + 3], '^(%d+) (%S+) (%d+) (%d) (.*)$')
  local score = redis.call('ZSCORE', used, id)
  local is_curated = not score and redis.call('HEXISTS', about, id) == 1
  if is_curated and worth ~= '-' then
    reply[1] = -1
  else
    if score or is_curated then
      reply[1] = 1
      forget(id)
    end
    local total = redis.call('INCRBY', bytes, size)
    while total > size_max do
      local least = redis.call('ZRANGE', used, 0, 0)[1]
      if not least then break end
      total = total - forget(least)
      redis.call('HDEL', vectors, least)
      reply[#reply + 1] = least
    end
    if total > size_max then
      reply[1] = -2
      redis.call('DECRBY', bytes, size)
    else
      redis.call('HSET', entries, id, ARGV[a + 1])
      redis.call('HSET', about, id, ARGV[a + 2])
      if worth ~= '-' then redis.call('ZADD', used, used_at(score, now, half_life, worth), id) end
      redis.call('ZADD', expires, expires_ms, id)
      last = math.max(last, tonumber(expires_ms))
    end
  end
  for _ = 1, links do
    redis.call('SET', KEYS[link], warm, 'PX', ARGV[4])
    link = link + 1
  end
  if claims == '1' then
    redis.call('DEL', KEYS[link])
    link = link + 1
  end
  if ARGV[a + 4] ~= '' and reply[1] >= 0 then
    local key = string.sub(ARGV[a + 4], 1, 16)
    redis.call('HSET', words, key, string.sub(ARGV[a + 4], 17), id .. 'p', key)
  end
  replies[#replies + 1] = reply
end
local ttl = last - now
if redis.call('PTTL', about) < ttl then
  local until_ms = string.format('%.0f', last + math.floor(ttl / 16))
  for i = 1, 8 do redis.call('PEXPIREAT', KEYS[i], until_ms) end
end
return replies
"""
)

# ARGV: exacts. Answers {count, bytes}.
DROP = (
    _FORGET
    + """
local count, freed = 0, 0
for _, id in ipairs(ARGV) do
  if redis.call('HEXISTS', about, id) == 1 then count = count + 1 end
  freed = freed + forget(id)
  redis.call('HDEL', vectors, id)
end
if redis.call('HLEN', about) == 0 then
  redis.call('DEL', entries, about, used, expires, bytes, vectors, groups, words)
end
return {count, freed}
"""
)

# The entry that words point at, and the pointer; nil where there is none, where its answer is out of
# service, or where that has come into another group since.
POINTED = """
local function pointed(key, entries, words, groups, suspended)
  local pointer = redis.call('HGET', words, key)
  if not pointer then return nil end
  local id, answer, made = string.sub(pointer, 1, 16), string.sub(pointer, 1, 24), string.sub(pointer, 25, 48)
  local known, group = redis.call('HGET', groups, id), answer
  if known and string.sub(known, 1, 8) == string.sub(answer, 17) then group = string.sub(known, 9) end
  if made ~= string.rep('\\0', 24) and made ~= group then return nil end
  if redis.call('HEXISTS', suspended, 'a' .. answer) == 1 then return nil end
  if redis.call('HEXISTS', suspended, 'g' .. group) == 1 then return nil end
  local entry = redis.call('HGET', entries, id)
  return entry and {4, 0, entry, pointer} or nil
end
"""

# Ends a claim, if it is of this process.
RELEASED = """
local function release(key, process)
  local claim = redis.pcall('GET', key)
  if type(claim) == 'string' and string.match(claim, '^(%x+):') == process then redis.call('DEL', key) end
end
"""

# Points words at an entry. ARGV: size_max, key of the words, exact, its answer's time, the rest of the
# pointer, process. KEYS[9]: a claim of the process that ends, if any. The pointer counts in the entry's size,
# and is not kept where that does not fit. An entry has nine keys at most: its own, and those of the
# latest prompts. Answers whether it was kept.
POINT = (
    RELEASED
    + """
local about, bytes, groups, words = KEYS[2], KEYS[5], KEYS[7], KEYS[8]
local key, id = ARGV[2], ARGV[3]
if KEYS[9] then release(KEYS[9], ARGV[6]) end
local known = redis.call('HGET', about, id)
if not known then return 0 end
local both = redis.call('HMGET', words, id .. 'p', key)
local listed, was = both[1] or '', both[2]
if not (was and string.sub(was, 1, 16) == id) then
  local more = #ARGV[5] + 200
  if redis.call('GET', bytes) + more > tonumber(ARGV[1]) then return 0 end
  if #listed >= 144 then
    local oldest = string.sub(listed, 17, 32)
    local pointer = redis.call('HGET', words, oldest)
    if pointer and string.sub(pointer, 1, 16) == id then redis.call('HDEL', words, oldest) end
    listed = string.sub(listed, 1, 16) .. string.sub(listed, 33)
  else
    local size = tonumber(string.sub(known, 1, 10)) + more
    redis.call('HSET', about, id, string.format('%010d', size) .. string.sub(known, 11))
    redis.call('INCRBY', bytes, more)
  end
  listed = listed .. key
end
local joined, group = redis.call('HGET', groups, id), id .. ARGV[4]
if joined and string.sub(joined, 1, 8) == ARGV[4] then group = string.sub(joined, 9) end
redis.call('HSET', words, key, id .. ARGV[4] .. group .. ARGV[5], id .. 'p', listed)
if redis.call('PTTL', words) < 0 then
  local left = redis.call('PTTL', about)
  if left > 0 then redis.call('PEXPIRE', words, left) end
end
return 1
"""
)

# KEYS: vectors, about. ARGV: pairs of exact, value. A vector lives only beside its entry, and no
# longer than its partition.
PUT_VECTORS = """
for i = 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 1 then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
local left = redis.call('PTTL', KEYS[2])
if left > 0 then redis.call('PEXPIRE', KEYS[1], left) end
return 1
"""

# decision: sketches-count
# ARGV: size_max, then pairs of exact, sketch. A sketch lives beside its entry and counts in its size;
# what has been worth least goes for it, but not the entry itself. Answers the evicted.
PUT_SKETCHES = (
    _FORGET
    + """
local size_max, evicted = tonumber(ARGV[1]), {}
for i = 2, #ARGV, 2 do
  local id, sketch, field = ARGV[i], ARGV[i + 1], ARGV[i] .. 'a'
  local more = #sketch - redis.call('HSTRLEN', vectors, field)
  local fits = redis.call('HEXISTS', about, id) == 1
  while fits and redis.call('GET', bytes) + more > size_max do
    local least = redis.call('ZRANGE', used, 0, 0)[1]
    fits = least and least ~= id
    if fits then
      forget(least)
      redis.call('HDEL', vectors, least)
      evicted[#evicted + 1] = least
    end
  end
  if fits then
    local known = redis.call('HGET', about, id)
    local size = tonumber(string.sub(known, 1, 10)) + more
    redis.call('HSET', about, id, string.format('%010d', size) .. string.sub(known, 11))
    redis.call('INCRBY', bytes, more)
    redis.call('HSET', vectors, field, sketch)
  end
end
local left = redis.call('PTTL', about)
if left > 0 then redis.call('PEXPIRE', vectors, left) end
return evicted
"""
)

# KEYS: the known partitions. ARGV: one of them, when it had stored last.
FORGET_PARTITION = """
local at = redis.call('ZSCORE', KEYS[1], ARGV[1])
if at and tonumber(at) == tonumber(ARGV[2]) then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return 0
"""
