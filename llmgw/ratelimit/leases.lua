-- One call of one gateway: it gives back, pays debts and takes, for many limits at once.
--
-- KEYS[1]  the epoch: changes whenever this store may have lost or rewound its memory
-- KEYS[2]  gateways that called lately, a sorted set by time
-- KEYS[3…] one per entry
-- ARGV[1]  MessagePack: {gateway, server, epoch it knows, entries}
--   a bucket:  {0, rate/s, burst, delta, need, head, big, want, hint, stale}
--   places:    {1, limit, running, want}
-- Answer: MessagePack {epoch, number of gateways, answers}
--   a bucket:  {grant, level, flow}      places: {held}
--
-- A bucket is "level time flow"; a missing one is full. It expires when it would be full.
-- Places are a hash: gateway -> "held until".

local LIVELY = 5e6          -- microseconds: who called in these counts as there
local PLACES = 5e6          -- microseconds: places of who does not call any more
local MEMORY = 5            -- seconds: time constant of the flow; see llmgw.core.bucket_share
local SLACK = 1e-6

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local call = cmsgpack.unpack(ARGV[1])
local gateway, server, known, entries = call[1], call[2], call[3], call[4]

local epoch = redis.call('GET', KEYS[1])
if not epoch or (server ~= '' and string.sub(epoch, 1, #server + 1) ~= server .. ' ') then
  epoch = server .. ' ' .. string.format('%.0f', now)
  redis.call('SET', KEYS[1], epoch)
end
redis.call('ZADD', KEYS[2], now, gateway)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - LIVELY)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '(' .. string.format('%.0f', now), '+inf')
redis.call('PEXPIRE', KEYS[2], 60000)
local gateways = redis.call('ZCARD', KEYS[2])

local function bucket(key, entry)
  local rate, burst, delta, need, head = entry[2], entry[3], entry[4], entry[5], entry[6]
  local big, want, hint, stale = entry[7], entry[8], entry[9], entry[10]
  local level, flow = burst, 0
  local state = redis.call('GET', key)
  if state then
    local was, at, flowed = string.match(state, '^(%S+) (%S+) (%S+)$')
    if was then
      local elapsed = math.max(0, (now - at) / 1000000)
      level = math.min(burst, was + elapsed * rate)
      flow = flowed * math.exp(-elapsed / MEMORY)
    end
  end
  if stale or known ~= epoch then
    level = math.min(level, hint)
  end
  level = math.max(-burst, math.min(burst, level + delta))
  local grant = 0
  if level + SLACK >= need then
    grant = need
  elseif level + SLACK >= head then
    grant = head + math.floor(math.max(0, level - head))
  elseif big and level > SLACK then
    grant = head
  end
  grant = grant + math.max(0, math.min(want, math.floor(level + SLACK - grant)))
  level = math.max(-burst, level - grant)
  flow = flow + (grant + math.max(0, -delta)) / MEMORY
  local full = math.ceil((burst - level) / rate * 1000) + 10000
  redis.call('SET', key, string.format('%.6f %.0f %.6f', level, now, flow), 'PX', string.format('%.0f', full))
  return {grant, level, flow}
end

local function places(key, entry)
  local limit, running, want = entry[2], entry[3], entry[4]
  local others = 0
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    if all[i] ~= gateway then
      local held, til = string.match(all[i + 1], '^(%S+) (%S+)$')
      if not til or tonumber(til) < now or tonumber(til) > now + PLACES then
        redis.call('HDEL', key, all[i])
      else
        others = others + held
      end
    end
  end
  local held = math.max(running, math.min(want, limit - others))
  if held > 0 then
    redis.call('HSET', key, gateway, held .. ' ' .. string.format('%.0f', now + PLACES))
    redis.call('PEXPIRE', key, PLACES / 1000 + 1000)
  else
    redis.call('HDEL', key, gateway)
  end
  return {held}
end

local answers = {}
for i, entry in ipairs(entries) do
  answers[i] = (entry[1] == 0 and bucket or places)(KEYS[i + 2], entry)
end
return cmsgpack.pack({epoch, gateways, answers})
