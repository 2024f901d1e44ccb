-- Valkey over RDMA, for Wireshark and tshark (4.0 or newer): names the control messages, and says what a notification
-- stands for and where in its window a WRITE lands.
--
--     tshark -r capture.pcapng -X lua_script:valkey-rdma.lua
--
-- It looks at every reliable connection over RoCE v2 and InfiniBand, for nothing in a packet says whose it is. Where windows
-- are, it learns from the registrations in the capture.

local valkey = Proto("valkey_rdma", "Valkey over RDMA")

local MESSAGE = 32
local OPCODES = {
    [0] = "GetServerFeature",
    [1] = "SetClientFeature",
    [2] = "Keepalive",
    [3] = "RegisterXferMemory",
}

local f = valkey.fields
f.opcode = ProtoField.uint16("valkey_rdma.opcode", "Opcode", base.HEX, OPCODES)
f.select = ProtoField.uint16("valkey_rdma.select", "Select", base.DEC)
f.features = ProtoField.uint64("valkey_rdma.features", "Features", base.HEX)
f.reserved = ProtoField.bytes("valkey_rdma.reserved", "Reserved")
f.address = ProtoField.uint64("valkey_rdma.address", "Window address", base.HEX)
f.length = ProtoField.uint32("valkey_rdma.length", "Window length", base.DEC)
f.rkey = ProtoField.uint32("valkey_rdma.rkey", "Window rkey", base.HEX)
f.bytes = ProtoField.uint32("valkey_rdma.bytes", "Bytes notified", base.DEC)
f.offset = ProtoField.uint32("valkey_rdma.offset", "Offset in the window", base.DEC)
f.room = ProtoField.uint32("valkey_rdma.window", "Window written into", base.DEC)

local length_wrong = ProtoExpert.new("valkey_rdma.length_wrong", "Not 32 bytes: no control message (VR-CTRL-002)",
    expert.group.MALFORMED, expert.severity.WARN)
local opcode_unknown = ProtoExpert.new("valkey_rdma.opcode_unknown", "Unknown opcode (VR-CTRL-004)",
    expert.group.MALFORMED, expert.severity.WARN)
local outside = ProtoExpert.new("valkey_rdma.outside", "Beyond the window (VR-FLOW-007)",
    expert.group.PROTOCOL, expert.severity.WARN)
valkey.experts = { length_wrong, opcode_unknown, outside }

local bth_opcode = Field.new("infiniband.bth.opcode")
local bth_pad = Field.new("infiniband.bth.padcnt")
local crc = Field.new("infiniband.invariant.crc")
local reth_address = Field.new("infiniband.reth.va")
local reth_rkey = Field.new("infiniband.reth.r_key")
local reth_length = Field.new("infiniband.reth.dmalen")
local immediate = Field.new("infiniband.immdt")

-- Windows by who announced them and their key; and, by frame, the one that a WRITE went into: a key may be used again.
local windows, written = {}, {}

function valkey.init()
    windows, written = {}, {}
end

-- A SEND of one packet.
local function message(bytes, pinfo, tree)
    if bytes:len() ~= MESSAGE then
        tree:add_proto_expert_info(length_wrong)
        return string.format("SEND of %d bytes", bytes:len())
    end
    local opcode = bytes:range(0, 2):uint()
    local name = OPCODES[opcode]
    tree:add(f.opcode, bytes:range(0, 2))
    if not name then
        tree:add_proto_expert_info(opcode_unknown)
        return string.format("unknown opcode 0x%04x", opcode)
    elseif opcode == 2 then
        tree:add(f.reserved, bytes:range(2, 30))
        return name
    elseif opcode < 2 then
        tree:add(f.select, bytes:range(2, 2))
        tree:add(f.reserved, bytes:range(4, 20))
        tree:add(f.features, bytes:range(24, 8))
        return string.format("%s select %d, features 0x%s", name, bytes:range(2, 2):uint(), bytes:range(24, 8):uint64():tohex())
    end
    tree:add(f.reserved, bytes:range(2, 14))
    tree:add(f.address, bytes:range(16, 8))
    tree:add(f.length, bytes:range(24, 4))
    tree:add(f.rkey, bytes:range(28, 4))
    local window = { address = bytes:range(16, 8):uint64(), length = bytes:range(24, 4):uint() }
    local rkey = bytes:range(28, 4):uint()
    if not pinfo.visited then
        windows[tostring(pinfo.net_src) .. "/" .. rkey] = window
    end
    return string.format("%s %d bytes at 0x%s, rkey 0x%08x", name, window.length, window.address:tohex(), rkey)
end

-- The first packet of a WRITE.
local function place(pinfo, tree)
    local rkey, length = reth_rkey().value, reth_length().value
    if not pinfo.visited then
        written[pinfo.number] = windows[tostring(pinfo.net_dst) .. "/" .. rkey]
    end
    local window = written[pinfo.number]
    if not window then
        return string.format("WRITE %d bytes", length)
    end
    local offset = (reth_address().value - window.address):tonumber()
    if offset < 0 or offset + length > window.length then
        tree:add_proto_expert_info(outside)
        return string.format("WRITE %d bytes outside the window of %d", length, window.length)
    end
    tree:add(f.offset, offset):set_generated()
    tree:add(f.room, window.length):set_generated()
    local full = (offset + length == window.length) and length > 0
    return string.format("WRITE %d bytes at %d of %d%s", length, offset, window.length, full and ", full" or "")
end

function valkey.dissector(buffer, pinfo, root)
    local opcode = bth_opcode()
    -- Reliable connections: SEND 0 to 5, WRITE 6 to 11.
    if not opcode or opcode.value > 11 then
        return
    end
    local tree = root:add(valkey)
    local said = {}
    if opcode.value == 4 or opcode.value == 5 then
        -- After the BTH of 12 bytes and an immediate, before pad and CRC.
        local first = bth_opcode().offset + (opcode.value == 4 and 12 or 16)
        local last = (crc() and crc().offset or buffer:len()) - bth_pad().value
        table.insert(said, message(buffer:range(first, last - first), pinfo, tree))
    elseif reth_length() then
        table.insert(said, place(pinfo, tree))
    end
    local imm = immediate()
    if imm then
        tree:add(f.bytes, imm.range)
        table.insert(said, string.format("imm %d", imm.range:uint()))
    end
    if #said == 0 then
        return
    end
    local text = table.concat(said, ", ")
    tree:append_text(": " .. text)
    pinfo.cols.protocol = "Valkey RDMA"
    pinfo.cols.info:append(" " .. text)
end

register_postdissector(valkey)
