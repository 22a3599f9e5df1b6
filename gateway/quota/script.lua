-- One tenant's counts in a shared store: ledger.py says what each operation means, and a test holds the two together.
-- KEYS: windows, expiries, leases, budgets (one hash slot). ARGV: operation, now in ms ("" for the server's clock), and
-- the operation's own. A script runs alone, so every operation is atomic.
local WINDOW_MS, BUCKET_MS, TRANSIENT_MS = 60000, 1000, 1000
local KEEP_WINDOWS_MS, KEEP_MS = 120000, 40 * 86400000
local windows, expiries, leases, budgets = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function clock()
  if ARGV[2] ~= '' then return tonumber(ARGV[2]) end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local last = tonumber(redis.call('HGET', windows, 'clock') or 0)
  if now <= last then return last end -- a clock that was set back stands still: nothing is given twice
  redis.call('HSET', windows, 'clock', string.format('%d', now))
  return now
end
local now = clock()

local function leaves(bucket) return (bucket + 1) * BUCKET_MS + WINDOW_MS end

-- Windows: fields r:<second> and t:<second>.
local function window(kind)
  local held, used = {}, 0
  local fields = redis.call('HGETALL', windows)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 2) == kind then
      local bucket, amount = tonumber(string.sub(fields[i], 3)), tonumber(fields[i + 1])
      if leaves(bucket) <= now then
        redis.call('HDEL', windows, fields[i])
      else
        table.insert(held, {bucket, amount})
        used = used + amount
      end
    end
  end
  table.sort(held, function(a, b) return a[1] < b[1] end)
  return {held = held, used = used}
end

local function wait(of, over)
  for _, entry in ipairs(of.held) do
    over = over - entry[2]
    if over <= 0 then return leaves(entry[1]) - now end
  end
  return 0
end

local function reset(of)
  local last = 0
  for _, entry in ipairs(of.held) do
    if entry[2] ~= 0 then last = leaves(entry[1]) - now end
  end
  return last
end

local function add(kind, bucket, amount)
  local field = kind .. string.format('%d', bucket)
  if leaves(bucket) > now and (amount > 0 or redis.call('HEXISTS', windows, field) == 1) then
    redis.call('HINCRBY', windows, field, string.format('%d', amount))
    redis.call('PEXPIRE', windows, KEEP_WINDOWS_MS)
  end
end

-- Budgets: field d or m holds start, end, used, reserved.
local function load(name)
  local packed = redis.call('HGET', budgets, name)
  if not packed then return nil end
  local start, finish, used, reserved = string.match(packed, '(%d+) (%d+) (%d+) (%-?%d+)')
  return {name = name, start = tonumber(start), finish = tonumber(finish),
          used = tonumber(used), reserved = tonumber(reserved)}
end

local function save(budget)
  if not budget then return end
  redis.call('HSET', budgets, budget.name,
    string.format('%d %d %d %d', budget.start, budget.finish, budget.used, budget.reserved))
  redis.call('PEXPIRE', budgets, KEEP_MS)
end

local function turned(budget, name, start, finish, seed)
  if budget and ((budget.start == start and budget.finish == finish) or finish <= budget.start) then return budget end
  if budget and budget.finish <= start then
    return {name = name, start = start, finish = finish, used = 0, reserved = 0}
  end
  if seed == '' then return nil end
  return {name = name, start = start, finish = finish, used = tonumber(seed), reserved = 0}
end

-- Leases: bucket, tokens, reported, base, start of day, start of month.
local function enter(id, bucket, tokens, reported, base, lease_ms)
  local starts = {}
  for i, name in ipairs({'d', 'm'}) do
    local budget = load(name)
    starts[i] = 0
    if budget then
      budget.reserved = budget.reserved + tokens - base
      starts[i] = budget.start
      save(budget)
    end
  end
  redis.call('HSET', leases, id,
    string.format('%d %d %d %d %d %d', bucket, tokens, reported, base, starts[1], starts[2]))
  redis.call('ZADD', expiries, string.format('%d', now + lease_ms), id)
  redis.call('PEXPIRE', leases, KEEP_MS)
  redis.call('PEXPIRE', expiries, KEEP_MS)
end

local function take(id)
  local packed = redis.call('HGET', leases, id)
  if not packed then return nil end
  redis.call('HDEL', leases, id)
  redis.call('ZREM', expiries, id)
  local bucket, tokens, reported, base, day, month = string.match(packed, '(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)')
  return {bucket = tonumber(bucket), tokens = tonumber(tokens), reported = tonumber(reported),
          base = tonumber(base), d = tonumber(day), m = tonumber(month)}
end

local function carry(old, new)
  if not old or not new or new == old or old.finish <= new.start then return end
  new.reserved = old.reserved
  local at = old.name == 'd' and 5 or 6
  local fields = redis.call('HGETALL', leases)
  for i = 1, #fields, 2 do
    local parts = {}
    for part in string.gmatch(fields[i + 1], '%d+') do table.insert(parts, part) end
    if tonumber(parts[at]) == old.start then
      parts[at] = string.format('%d', new.start)
      redis.call('HSET', leases, fields[i], table.concat(parts, ' '))
    end
  end
end

local function finish(lease, used)
  if used < lease.tokens then add('t:', lease.bucket, used - lease.tokens) end
  for _, name in ipairs({'d', 'm'}) do
    local budget = load(name)
    if budget and (budget.start == lease[name] or lease[name] == 0) then
      if lease[name] ~= 0 then budget.reserved = budget.reserved - (lease.tokens - lease.base) end
      budget.used = budget.used + math.max(used - lease.base, 0)
      save(budget)
    end
  end
end

local function expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', expiries, '-inf', string.format('%d', now))) do
    local lease = take(id)
    if lease then finish(lease, lease.reported) else redis.call('ZREM', expiries, id) end
  end
end

local function limit(at)
  if ARGV[at] == '' then return nil end
  return tonumber(ARGV[at])
end

-- ARGV 3..: lease, tokens, lease_ms, shadow, five limits, day start and end, month start and end, two seeds.
-- Answers nothing when it needs seeds, else: refusing dimension (0: none), wait, levels of both windows, what is left.
local function reserve()
  local id, tokens, lease_ms, shadow = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
  local streams, requests, per_minute, per_day, per_month = limit(7), limit(8), limit(9), limit(10), limit(11)
  local old_day, old_month = load('d'), load('m')
  local day = turned(old_day, 'd', tonumber(ARGV[12]), tonumber(ARGV[13]), ARGV[16])
  local month = turned(old_month, 'm', tonumber(ARGV[14]), tonumber(ARGV[15]), ARGV[17])
  if (per_day and not day) or (per_month and not month) then return {} end
  carry(old_day, day)
  carry(old_month, month)
  for name, budget in pairs({d = day or false, m = month or false}) do
    if budget then save(budget) else redis.call('HDEL', budgets, name) end
  end
  local r, t = window('r:'), window('t:')
  local refused, retry, left = 0, 0, 0
  if streams and redis.call('ZCARD', expiries) >= streams then
    refused = 1
    if streams > 0 then retry = TRANSIENT_MS end
  elseif requests and r.used >= requests then
    refused = 2
    if requests > 0 then retry = wait(r, r.used + 1 - requests) end
  elseif per_minute and t.used + tokens > per_minute then
    refused = 3
    if tokens <= per_minute then retry = wait(t, t.used + tokens - per_minute) end
    left = math.max(per_minute - t.used, 0)
  elseif per_day and day.used + day.reserved + tokens > per_day then
    refused = 4
    if day.used + tokens <= per_day then retry = TRANSIENT_MS end
    left = math.max(per_day - day.used - day.reserved, 0)
  elseif per_month and month.used + month.reserved + tokens > per_month then
    refused = 5
    if month.used + tokens <= per_month then retry = TRANSIENT_MS end
    left = math.max(per_month - month.used - month.reserved, 0)
  end
  if refused == 0 or shadow then
    local bucket = math.floor(now / BUCKET_MS)
    add('r:', bucket, 1)
    add('t:', bucket, tokens)
    enter(id, bucket, tokens, 0, 0, lease_ms)
    r, t = window('r:'), window('t:')
  end
  return {refused, retry, r.used, reset(r), t.used, reset(t), left}
end

-- ARGV 3..: lease, used, reported.
local function settle()
  local used, reported = tonumber(ARGV[4]), tonumber(ARGV[5])
  local lease = take(ARGV[3])
  if lease then
    if used < 0 then add('r:', lease.bucket, -1) end
    finish(lease, math.max(used, 0))
    return {}
  end
  for _, name in ipairs({'d', 'm'}) do
    local budget = load(name)
    if budget then
      budget.used = budget.used + math.max(used - reported, 0)
      save(budget)
    end
  end
  return {}
end

-- ARGV 3..: lease_ms, then of each lease: id, tokens, used, reported.
local function renew()
  for at = 4, #ARGV, 4 do
    local id, tokens, used, reported = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local packed = redis.call('HGET', leases, id)
    if packed then
      local head, tail = string.match(packed, '^(%d+ %d+) %d+ (.*)$')
      redis.call('HSET', leases, id, string.format('%s %d %s', head, used, tail))
      redis.call('ZADD', expiries, string.format('%d', now + tonumber(ARGV[3])), id)
    else
      enter(id, 0, tokens, used, reported, tonumber(ARGV[3]))
    end
  end
  return {}
end

-- ARGV 3..: day start and end, month start and end. Answers the levels of all dimensions, -1 for an unknown budget.
local function levels()
  local day = turned(load('d'), 'd', tonumber(ARGV[3]), tonumber(ARGV[4]), '')
  local month = turned(load('m'), 'm', tonumber(ARGV[5]), tonumber(ARGV[6]), '')
  return {redis.call('ZCARD', expiries), window('r:').used, window('t:').used,
          day and day.used + day.reserved or -1, month and month.used + month.reserved or -1}
end

expire()
if ARGV[1] == 'reserve' then return reserve() end
if ARGV[1] == 'settle' then return settle() end
if ARGV[1] == 'levels' then return levels() end
return renew()
