"""The Lua scripts that move money. Each is one atomic step in Redis and touches only the keys it is
given.

They know no windows in time and no SQL. Invariant, for every spend key: `held` is the sum of the
amounts of its holds, and `spent` the sum of the spends of the ledger rows of its team and window.

A hold is a member `id|amount` of a sorted set beside each spend key, scored by the end of its lease
(ms). The member contains all that a script needs to expire the hold, so no script needs a key that
it was not given. Amounts stay below 2**53, where Lua's numbers are exact. `_NOW` reads Redis's
clock unless the caller gave a time (tests do).
"""

from __future__ import annotations

_NOW = """
local now = tonumber(ARGV[1])
if not now then local t = redis.call('TIME'); now = t[1] * 1000 + math.floor(t[2] / 1000) end
"""

_SWEEP = """
local function sweep(spend, holds)
  local stale = redis.call('ZRANGEBYSCORE', holds, '-inf', now, 'LIMIT', 0, 1000)
  if #stale == 0 then return 0 end
  local freed = 0
  for _, member in ipairs(stale) do freed = freed + tonumber(string.match(member, '|(%d+)$')) end
  redis.call('ZREM', holds, unpack(stale))
  if freed > 0 then redis.call('HINCRBY', spend, 'held', string.format('%.0f', -freed)) end
  return freed
end
local function read(spend)
  local pair = redis.call('HMGET', spend, 'spent', 'held')
  return tonumber(pair[1] or 0), tonumber(pair[2] or 0)
end
local function keep(key, until_ms)
  if until_ms ~= '0' then redis.call('PEXPIREAT', key, until_ms) end
end
"""

# KEYS ready, done, then spend and holds of each window.
# ARGV now, member, amount, lease_ms, windows, keep_until of each window, then window, limit,
# is_hard of each budget.
# Replies {code, spent and held of each window as they were without this hold}: 1 taken, 0 refused,
# -1 not ready, -2 closed. The script looks for expired holds only if a budget would be exceeded
# with them; before, they change nothing. It sets a key's expiry when the key begins: without
# members, `holds` does not exist.
RESERVE = (
    _NOW
    + _SWEEP
    + """
local states = redis.call('MGET', KEYS[1], KEYS[2])
if not states[1] then return {-1} end
if states[2] then return {-2} end
local member, amount, windows = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[5])
local lease_end = string.format('%.0f', now + tonumber(ARGV[4]))
local reply, is_new = {1}, {}
for w = 1, windows do
  local spend, holds = KEYS[1 + 2 * w], KEYS[2 + 2 * w]
  is_new[w] = redis.call('ZADD', holds, lease_end, member) == 1
  local spent, held = read(spend)
  if not is_new[w] then held = held - amount end
  reply[2 * w], reply[2 * w + 1] = spent, held
end
for b = 6 + windows, #ARGV, 3 do
  local w, limit = tonumber(ARGV[b]), tonumber(ARGV[b + 1])
  if is_new[w] and reply[2 * w] + reply[2 * w + 1] + amount > limit then
    reply[2 * w + 1] = reply[2 * w + 1] - sweep(KEYS[1 + 2 * w], KEYS[2 + 2 * w])
    if ARGV[b + 2] == '1' and reply[2 * w] + reply[2 * w + 1] + amount > limit then reply[1] = 0 end
  end
end
for w = 1, windows do
  local spend, holds = KEYS[1 + 2 * w], KEYS[2 + 2 * w]
  if reply[1] == 0 then
    if is_new[w] then redis.call('ZREM', holds, member) end
  elseif is_new[w] then
    redis.call('HINCRBY', spend, 'held', ARGV[3])
    if reply[2 * w + 1] == 0 then
      keep(spend, ARGV[5 + w])
      keep(holds, ARGV[5 + w])
    end
  end
end
return reply
"""
)

_LET_GO = """
local function let_go(spend, holds, member, amount)
  if redis.call('ZREM', holds, member) == 1 and amount ~= '0' then
    redis.call('HINCRBY', spend, 'held', '-' .. amount)
  end
end
"""

# Settles many holds, in groups of one team, hour and set of held windows.
# KEYS ledger, then of each group: spend of the five windows of its moment, holds of each window
# held, done of each settlement.
# ARGV done_ms, then of each group: settlements, windows held, team, keep_until of each window,
# place (0 to 4) of each window held; and of each settlement: member, amount, spend, at_ms, row. A
# group's sums stay below 2**53.
# Replies for each settlement 1, or 0 if its hold was settled or released before. A window's first
# spend sets its count's expiry. Rows come before counts: if Redis refuses a count (a key of another
# type), the ledger has the row.
SETTLE = """
local reply, k, a = {}, 2, 2
while a <= #ARGV do
  local count, held, team = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), ARGV[a + 2]
  local keeps, places, items = a + 3, a + 8, a + 8 + held
  local spends, holds, dones = k, k + 5, k + 5 + held
  local spent, fresh = 0, {}
  for i = 0, count - 1 do
    local item = items + 5 * i
    if redis.call('SET', KEYS[dones + i], 'settled', 'NX', 'PX', ARGV[1]) then
      reply[#reply + 1], fresh[#fresh + 1] = 1, item
      redis.call(
        'XADD', KEYS[1], '*', 'team', team, 'at_ms', ARGV[item + 3], 'cost', ARGV[item + 2], 'row', ARGV[item + 4]
      )
      spent = spent + tonumber(ARGV[item + 2])
    else
      reply[#reply + 1] = 0
    end
  end
  for h = 0, held - 1 do
    local freed = 0
    for _, item in ipairs(fresh) do
      if redis.call('ZREM', KEYS[holds + h], ARGV[item]) == 1 then freed = freed + tonumber(ARGV[item + 1]) end
    end
    if freed > 0 then redis.call('HINCRBY', KEYS[spends + ARGV[places + h]], 'held', string.format('%.0f', -freed)) end
  end
  if spent > 0 then
    local amount = string.format('%.0f', spent)
    for w = 0, 4 do
      local total = redis.call('HINCRBY', KEYS[spends + w], 'spent', amount)
      if total == spent and ARGV[keeps + w] ~= '0' then redis.call('PEXPIREAT', KEYS[spends + w], ARGV[keeps + w]) end
    end
  end
  k, a = dones + count, items + 5 * count
end
return reply
"""

# KEYS done, then spend and holds of each window held. ARGV done_ms, member, amount. Replies as
# SETTLE does.
RELEASE = (
    _LET_GO
    + """
if not redis.call('SET', KEYS[1], 'released', 'NX', 'PX', ARGV[1]) then return 0 end
for k = 2, #KEYS, 2 do let_go(KEYS[k], KEYS[k + 1], ARGV[2], ARGV[3]) end
return 1
"""
)

# KEYS done, then spend and holds of each window held. ARGV now, member, amount, lease_ms,
# keep_until of each window.
# Replies 0 if the hold is closed, else 1. A hold that expired or that Redis lost is taken again,
# because its generation is running and will be charged.
RENEW = (
    _NOW
    + _SWEEP
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for w = 1, (#KEYS - 1) / 2 do
  local spend, holds = KEYS[2 * w], KEYS[2 * w + 1]
  if redis.call('ZADD', holds, string.format('%.0f', now + tonumber(ARGV[4])), ARGV[2]) == 1 then
    redis.call('HINCRBY', spend, 'held', ARGV[3])
  end
  keep(spend, ARGV[4 + w])
  keep(holds, ARGV[4 + w])
end
return 1
"""
)

# KEYS spend and holds of each window. ARGV now. Replies spent and held of each, without expired
# holds.
SPENT = (
    _NOW
    + _SWEEP
    + """
local reply = {}
for w = 1, #KEYS / 2 do
  sweep(KEYS[2 * w - 1], KEYS[2 * w])
  reply[2 * w - 1], reply[2 * w] = read(KEYS[2 * w - 1])
end
return reply
"""
)

# KEYS lock, ledger, set aside, then the spend key of each window.
# ARGV token, then team, start_ms, end_ms or 0, drained spend, keep_until of each window. Sets
# `spent` to the ledger's sum: its drained part as given, plus the entries still in the two streams.
# Only the holder of the writer's lock may call it, because then nothing is drained between its sum
# and this step.
# Replies {-1} if the lock was lost, else {windows that were wrong, sum of the differences}.
RESTATE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {-1} end
local waiting = {}
for k = 2, 3 do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[k], '-', '+')) do
    local fields, row = entry[2], {}
    for f = 1, #fields, 2 do row[fields[f]] = fields[f + 1] end
    if row.cost ~= '0' then waiting[#waiting + 1] = {row.team, tonumber(row.at_ms), tonumber(row.cost)} end
  end
end
local wrong, drift = 0, 0
for w = 1, #KEYS - 3 do
  local a = 5 * w - 3
  local start_ms, end_ms, total = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  for _, row in ipairs(waiting) do
    if row[1] == ARGV[a] and row[2] >= start_ms and (end_ms == 0 or row[2] < end_ms) then total = total + row[3] end
  end
  local spent = tonumber(redis.call('HGET', KEYS[3 + w], 'spent') or 0)
  if spent ~= total then
    wrong, drift = wrong + 1, drift + math.abs(spent - total)
    redis.call('HSET', KEYS[3 + w], 'spent', string.format('%.0f', total))
    if ARGV[a + 4] ~= '0' then redis.call('PEXPIREAT', KEYS[3 + w], ARGV[a + 4]) end
  end
end
return {wrong, drift}
"""

# KEYS lock, ready. ARGV token. Replies 1, or -1 if the lock was lost.
MARK_READY = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], '1')
return 1
"""
