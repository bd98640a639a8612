"""The Lua scripts that change money. Each is one atomic step in Redis and touches only its KEYS.

They know no calendar and no SQL. Invariant, for every spend key: `held` is the sum of its holds'
amounts, and `spent` the sum of the amounts of its ledger rows. A rolling window's key has a field
for each bucket of time instead of `spent`.

A hold is a member `id|amount` of a sorted set beside each spend key, scored by the end of its lease
(ms). The member contains all that a script needs to expire the hold, so no script needs a key
outside its KEYS. Amounts stay below 2**53, where Lua's numbers are exact. `_NOW` reads Redis's
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
local function read(spend, oldest)
  if not oldest or oldest == '' then
    local pair = redis.call('HMGET', spend, 'spent', 'held')
    return tonumber(pair[1] or 0), tonumber(pair[2] or 0)
  end
  local all, spent, held = redis.call('HGETALL', spend), 0, 0
  for f = 1, #all, 2 do
    if all[f] == 'held' then held = tonumber(all[f + 1])
    elseif tonumber(all[f]) < tonumber(oldest) then redis.call('HDEL', spend, all[f])
    else spent = spent + tonumber(all[f + 1]) end
  end
  return spent, held
end
local function keep(key, until_ms)
  if until_ms ~= '0' then redis.call('PEXPIREAT', key, until_ms) end
end
"""

# KEYS ready, done, then spend and holds of each count, then of each count that belongs to a value:
# the set of values, spend and holds of the count that further values share.
# ARGV now, hold's id, lease_ms, then of each count, with a blank between: most, usual, keep_until,
# oldest bucket or '', its budgets (limit:is_hard may_cut, each with a comma behind), values at most
# (0: it belongs to no value), digest, text.
# Replies {code, spent and held of each count as they were without this hold, 1 if the count that
# further values share was taken}: 1 taken, 2 taken with the usual amounts, 0 refused, -1 not ready,
# -2 closed. `may_cut`: a budget without room for the most takes the usual; a repeated call gets what
# the first one took. The script looks for
# expired holds only if a budget would be exceeded with them; before, they change nothing. It sets a
# key's expiry when the key begins: without members, `holds` does not exist.
RESERVE = (
    _NOW
    + _SWEEP
    + """
local states = redis.call('MGET', KEYS[1], KEYS[2])
if not states[1] then return {-1} end
if states[2] then return {-2} end
local id, counts = ARGV[2], #ARGV - 3
local lease_end = string.format('%.0f', now + tonumber(ARGV[3]))
local amounts, keeps, budgets, values, fields = {}, {}, {}, {}, {}
local spends, holds, other, spent, held, is_new = {}, {}, {}, {}, {}, {}
local k, was_cut = 3 + 2 * counts, false
for c = 1, counts do
  local most, usual, keeps_until, oldest, limits, values_max, digest, shown =
    string.match(ARGV[3 + c], '^(%d+) (%d+) (%d+) (%S*) (%S*) (%d+) (%S*) (.*)$')
  amounts[c], keeps[c], budgets[c], fields[c] = {most, usual}, keeps_until, limits, {digest, shown}
  spends[c], holds[c], other[c] = KEYS[1 + 2 * c], KEYS[2 + 2 * c], 0
  if values_max ~= '0' then
    local text = redis.call('HGET', KEYS[k], digest)
    if text ~= shown then
      if text or redis.call('HLEN', KEYS[k]) < tonumber(values_max) then
        values[c] = KEYS[k]
      else
        spends[c], holds[c], other[c] = KEYS[k + 1], KEYS[k + 2], 1
      end
    end
    k = k + 3
  end
  spent[c], held[c] = read(spends[c], oldest)
  is_new[c] = true
  for place, amount in ipairs(amounts[c]) do
    if is_new[c] and redis.call('ZSCORE', holds[c], id .. '|' .. amount) then
      is_new[c], was_cut = false, was_cut or place == 2
      held[c] = held[c] - tonumber(amount)
      redis.call('ZADD', holds[c], lease_end, id .. '|' .. amount)
    end
  end
end
local function fits(is_cut)
  for c = 1, counts do
    for limit, is_hard, may_cut in string.gmatch(budgets[c], '(%-?%d+):(%d)(%d),') do
      local amount = tonumber(amounts[c][is_cut and may_cut == '1' and 2 or 1])
      if is_new[c] and spent[c] + held[c] + amount > tonumber(limit) then
        held[c] = held[c] - sweep(spends[c], holds[c])
        if is_hard == '1' and spent[c] + held[c] + amount > tonumber(limit) then return false end
      end
    end
  end
  return true
end
local code = not was_cut and fits(false) and 1 or fits(true) and 2 or 0
local reply = {code}
for c = 1, counts do
  reply[3 * c - 1], reply[3 * c], reply[3 * c + 1] = spent[c], held[c], other[c]
  if code > 0 and is_new[c] then
    local amount = amounts[c][code]
    if values[c] then
      redis.call('HSET', values[c], fields[c][1], fields[c][2])
      keep(values[c], keeps[c])
    end
    redis.call('ZADD', holds[c], lease_end, id .. '|' .. amount)
    redis.call('HINCRBY', spends[c], 'held', amount)
    if held[c] == 0 then
      keep(spends[c], keeps[c])
      keep(holds[c], keeps[c])
    end
  end
end
return reply
"""
)

# Settles many holds, in groups of one team, hour and set of held windows.
# KEYS ledger, then of each group: spend of the five windows of its moment, holds of each window
# held, done of each settlement, spend and holds of each further count of each settlement.
# ARGV done_ms, then of each group, with blanks between: settlements, windows held, team, keep_until
# of each window, place (0 to 4) of each window held; of each settlement: its member, spend, at_ms and
# number of further counts with bars between, and its row; and of each further count: member or '',
# amount held, amount to add, its field, keep_until. A group's sums stay below 2**53. An entry of the
# stream has in `charges` what was added to counts other than the five.
# Replies for each settlement 1, or 0 if its hold was settled or released before. A window's first
# spend sets its count's expiry. Rows come before counts: if Redis refuses a count (a key of another
# type), the ledger has the row.
SETTLE = """
local reply, k, a = {}, 2, 2
while a <= #ARGV do
  local head, item = {}, a + 1
  for number in string.gmatch(ARGV[a], '%d+') do head[#head + 1] = number end
  local count, held, team = tonumber(head[1]), tonumber(head[2]), head[3]
  local spends, holds, dones = k, k + 5, k + 5 + held
  local further = dones + count
  local spent, fresh = 0, {}
  for i = 0, count - 1 do
    local member, amount, spend, at_ms, more = string.match(ARGV[item], '^(.*|(%d+))|(%d+)|(%d+)|(%d+)$')
    if redis.call('SET', KEYS[dones + i], 'settled', 'NX', 'PX', ARGV[1]) then
      reply[#reply + 1], fresh[#fresh + 1] = 1, {member, tonumber(amount)}
      local charges = {}
      for m = 0, more - 1 do
        local c = item + 2 + 5 * m
        if ARGV[c + 3] ~= '' then
          charges[#charges + 1] = string.match(KEYS[further + 2 * m], 'spend:(.*)') .. ' ' .. ARGV[c + 3] .. ' ' .. ARGV[c + 2]
        end
      end
      local entry = {'team', team, 'at_ms', at_ms, 'cost', spend, 'row', ARGV[item + 1]}
      if #charges > 0 then entry[9], entry[10] = 'charges', table.concat(charges, ' ') end
      redis.call('XADD', KEYS[1], '*', unpack(entry))
      spent = spent + tonumber(spend)
      for m = 0, more - 1 do
        local c, key = item + 2 + 5 * m, KEYS[further + 2 * m]
        if ARGV[c] ~= '' and redis.call('ZREM', KEYS[further + 2 * m + 1], ARGV[c]) == 1 and ARGV[c + 1] ~= '0' then
          redis.call('HINCRBY', key, 'held', '-' .. ARGV[c + 1])
        end
        if ARGV[c + 3] ~= '' and ARGV[c + 2] ~= '0' then
          redis.call('HINCRBY', key, ARGV[c + 3], ARGV[c + 2])
          if ARGV[c + 4] ~= '0' then redis.call('PEXPIREAT', key, ARGV[c + 4]) end
        end
      end
    else
      reply[#reply + 1] = 0
    end
    item, further = item + 2 + 5 * more, further + 2 * more
  end
  for h = 0, held - 1 do
    local freed = 0
    for _, one in ipairs(fresh) do
      if redis.call('ZREM', KEYS[holds + h], one[1]) == 1 then freed = freed + one[2] end
    end
    if freed > 0 then redis.call('HINCRBY', KEYS[spends + head[9 + h]], 'held', string.format('%.0f', -freed)) end
  end
  if spent > 0 then
    local amount = string.format('%.0f', spent)
    for w = 0, 4 do
      local total = redis.call('HINCRBY', KEYS[spends + w], 'spent', amount)
      if total == spent and head[4 + w] ~= '0' then redis.call('PEXPIREAT', KEYS[spends + w], head[4 + w]) end
    end
  end
  k, a = further, item
end
return reply
"""

# KEYS done, then spend and holds of each count. ARGV done_ms, then member and amount of each count.
# Replies as SETTLE does.
RELEASE = """
if not redis.call('SET', KEYS[1], 'released', 'NX', 'PX', ARGV[1]) then return 0 end
for k = 2, #KEYS, 2 do
  if redis.call('ZREM', KEYS[k + 1], ARGV[k]) == 1 and ARGV[k + 1] ~= '0' then
    redis.call('HINCRBY', KEYS[k], 'held', '-' .. ARGV[k + 1])
  end
end
return 1
"""

# KEYS done, then spend and holds of each count. ARGV now, lease_ms, then member, amount and
# keep_until of each count.
# Replies 0 if the hold is closed, else 1. A hold that expired or that Redis lost is taken again,
# because its generation is running and will be charged.
RENEW = (
    _NOW
    + _SWEEP
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local lease_end = string.format('%.0f', now + tonumber(ARGV[2]))
for c = 1, (#KEYS - 1) / 2 do
  local spend, holds, a = KEYS[2 * c], KEYS[2 * c + 1], 3 * c
  if redis.call('ZADD', holds, lease_end, ARGV[a]) == 1 then redis.call('HINCRBY', spend, 'held', ARGV[a + 1]) end
  keep(spend, ARGV[a + 2])
  keep(holds, ARGV[a + 2])
end
return 1
"""
)

# KEYS spend and holds of each count. ARGV now, then the oldest bucket of each count or ''. Replies
# spent and held of each, without expired holds.
SPENT = (
    _NOW
    + _SWEEP
    + """
local reply = {}
for c = 1, #KEYS / 2 do
  sweep(KEYS[2 * c - 1], KEYS[2 * c])
  reply[2 * c - 1], reply[2 * c] = read(KEYS[2 * c - 1], ARGV[1 + c])
end
return reply
"""
)

# KEYS ledger. ARGV now. Replies the time in ms, and the id of the oldest entry or ''.
LEDGER_TIMES = (
    _NOW
    + """
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
return {now, oldest and oldest[1] or ''}
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

# KEYS lock, ledger, set aside, then the spend key and the set of values of each count. ARGV token,
# then name, field, drained amount, keep_until, digest or '' of each. RESTATE for the counts that
# budgets have of their own: it puts their values back into their sets, without their texts.
RESTATE_OWN = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {-1} end
local waiting = {}
for k = 2, 3 do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[k], '-', '+')) do
    for f = 1, #entry[2], 2 do
      if entry[2][f] == 'charges' then
        for name, field, amount in string.gmatch(entry[2][f + 1], '(%S+) (%S+) (%d+)') do
          local place = name .. ' ' .. field
          waiting[place] = (waiting[place] or 0) + tonumber(amount)
        end
      end
    end
  end
end
local wrong = 0
for c = 1, (#KEYS - 3) / 2 do
  local a, spend, values = 5 * c - 3, KEYS[2 + 2 * c], KEYS[3 + 2 * c]
  if ARGV[a + 4] ~= '' and redis.call('HSETNX', values, ARGV[a + 4], '') == 1 and ARGV[a + 3] ~= '0' then
    redis.call('PEXPIREAT', values, ARGV[a + 3])
  end
  local total = tonumber(ARGV[a + 2]) + (waiting[ARGV[a] .. ' ' .. ARGV[a + 1]] or 0)
  if tonumber(redis.call('HGET', spend, ARGV[a + 1]) or 0) ~= total then
    wrong = wrong + 1
    redis.call('HSET', spend, ARGV[a + 1], string.format('%.0f', total))
    if ARGV[a + 3] ~= '0' then redis.call('PEXPIREAT', spend, ARGV[a + 3]) end
  end
end
return {wrong}
"""
