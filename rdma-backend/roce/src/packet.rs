//! RoCE v2 packets: Ethernet, IP, UDP, the transport headers of InfiniBand, and the invariant CRC.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{IpDscp, IpEcn, IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder};
use rdma_backend::CompletionStatus;

/// UDP port of RoCE v2.
const PORT: u16 = 4791;
const ETHERNET: usize = 14;
const UDP: usize = 8;
const CRC: usize = 4;
/// The number of packet sequence numbers: 24 bits.
pub const SEQUENCES: u32 = 1 << 24;

/// Operations of reliable connections, by their lowest opcode (InfiniBand, table of BTH opcodes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// The request of an RDMA READ.
    ReadRequest,
    /// The response to an RDMA READ.
    ReadResponse,
    /// Acknowledgement, positive or negative.
    Acknowledge,
    /// The request of COMPARE and SWAP.
    CompareSwap,
    /// The request of FETCH and ADD.
    FetchAdd,
    /// The response to either.
    AtomicAcknowledge,
    /// SEND of an unreliable datagram.
    Datagram,
}

impl Kind {
    /// Returns the opcode of a packet, by its place in the message.
    #[must_use]
    pub const fn opcode(self, first: bool, last: bool, immediate: bool) -> u8 {
        // First, middle, last, last with immediate, only, only with immediate (not for responses).
        let base = match self {
            Self::Send => 0,
            Self::Write => 6,
            Self::ReadRequest => return 12,
            Self::ReadResponse if first && last => return 16,
            Self::ReadResponse => 13,
            Self::Acknowledge => return 17,
            Self::AtomicAcknowledge => return 18,
            Self::CompareSwap => return 19,
            Self::FetchAdd => return 20,
            Self::Datagram => 96,
        };
        base + match (first, last) {
            (true, false) => 0,
            (false, false) => 1,
            (false, true) => 2 + immediate as u8,
            (true, true) => 4 + immediate as u8,
        }
    }
}

/// Returns the header of a WRITE's first packet and of a READ (RETH).
#[must_use]
pub fn remote(address: u64, rkey: u32, len: usize) -> Vec<u8> {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    [&address.to_be_bytes()[..], &rkey.to_be_bytes(), &len.to_be_bytes()].concat()
}

/// Returns the header of an atomic operation (AtomicETH): what is added or stored, and what is
/// expected.
#[must_use]
pub fn atomic(address: u64, rkey: u32, new: u64, compare: u64) -> Vec<u8> {
    [&address.to_be_bytes()[..], &rkey.to_be_bytes(), &new.to_be_bytes(), &compare.to_be_bytes()].concat()
}

/// Returns the header of a datagram (DETH): its Q_Key, and the queue pair that sent it.
#[must_use]
pub fn datagram(key: u32, source: u32) -> Vec<u8> {
    [key.to_be_bytes(), (source % SEQUENCES).to_be_bytes()].concat()
}

/// Returns the header of a response (AETH): its syndrome, and how many messages were executed.
#[must_use]
pub fn answer(syndrome: u8, executed: u32) -> Vec<u8> {
    ((u32::from(syndrome) << 24) | (executed % SEQUENCES)).to_be_bytes().to_vec()
}

/// Syndrome of an acknowledgement, without a count of credits.
pub const ACKNOWLEDGED: u8 = 0x1f;
/// Syndrome of a message that found no receive. The lowest five bits say when to retry.
pub const NOT_READY: u8 = 0x20;

/// Returns the syndrome of a message refused with this status; `None` if no response says so.
#[must_use]
pub const fn refused(status: CompletionStatus) -> Option<u8> {
    Some(match status {
        CompletionStatus::RNR_RETRY_EXC_ERR => NOT_READY,
        CompletionStatus::REM_INV_REQ_ERR => 0x61,
        CompletionStatus::REM_ACCESS_ERR => 0x62,
        CompletionStatus::REM_OP_ERR => 0x63,
        _ => return None,
    })
}

/// A packet before it is encoded.
#[derive(Clone, Debug)]
pub struct Packet<'a> {
    /// The source address.
    pub from: IpAddr,
    /// The destination address.
    pub to: IpAddr,
    /// The traffic class; in IPv4, the type of service.
    pub traffic_class: u8,
    /// Its opcode.
    pub opcode: u8,
    /// The destination queue pair.
    pub pair: u32,
    /// Its packet sequence number.
    pub sequence: u32,
    /// Whether it requests an acknowledgement.
    pub acknowledge: bool,
    /// RETH, AETH and immediate, in this order.
    pub headers: Vec<u8>,
    /// The known bytes of the payload.
    pub payload: &'a [u8],
    /// The length of the payload. Unknown bytes are zero.
    pub len: usize,
}

impl Packet<'_> {
    /// Returns a packet without addresses, headers and bytes.
    #[must_use]
    pub const fn new(opcode: u8, sequence: u32) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            from: nowhere,
            to: nowhere,
            traffic_class: 0,
            opcode,
            pair: 0,
            sequence,
            acknowledge: false,
            headers: Vec::new(),
            payload: &[],
            len: 0,
        }
    }

    /// Sets the source, the destination and the destination queue pair.
    #[must_use]
    pub fn between(self, from: IpAddr, to: IpAddr, pair: u32) -> Self {
        Self { from, to, pair, ..self }
    }

    /// Encodes the frame.
    #[must_use]
    pub fn frame(&self) -> Vec<u8> {
        let pad = self.len.wrapping_neg() % 4;
        let mut datagram = vec![self.opcode, (pad as u8) << 4, 0xff, 0xff, 0];
        datagram.extend(&self.pair.to_be_bytes()[1..]);
        datagram.push(if self.acknowledge { 0x80 } else { 0 });
        datagram.extend(&self.sequence.to_be_bytes()[1..]);
        datagram.extend(&self.headers);
        let transport = datagram.len();
        datagram.extend(self.payload.iter().take(self.len));
        datagram.resize(transport + self.len + pad + CRC, 0);

        if let Some(crc) = invariant_crc(&self.in_ethernet(&datagram)) {
            let end = datagram.len() - CRC;
            datagram[end..].copy_from_slice(&crc);
        }
        // Last: the checksum of UDP covers the CRC, and not the other way round.
        self.in_ethernet(&datagram)
    }

    fn in_ethernet(&self, datagram: &[u8]) -> Vec<u8> {
        let mac = |ip: IpAddr| {
            let octets = v6(ip).octets();
            [2, 0, octets[12], octets[13], octets[14], octets[15]]
        };
        let ethernet = PacketBuilder::ethernet2(mac(self.from), mac(self.to));
        let class = self.traffic_class;
        let header = match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let header = Ipv4Header {
                    dscp: IpDscp::try_new(class >> 2).unwrap_or_default(),
                    ecn: IpEcn::try_new(class & 3).unwrap_or_default(),
                    time_to_live: 64,
                    source: from.octets(),
                    destination: to.octets(),
                    ..Ipv4Header::default()
                };
                IpHeaders::Ipv4(header, Default::default())
            }
            (from, to) => {
                let [source, destination] = [from, to].map(|ip| v6(ip).octets());
                let header = Ipv6Header {
                    traffic_class: class,
                    hop_limit: 64,
                    source,
                    destination,
                    ..Ipv6Header::default()
                };
                IpHeaders::Ipv6(header, Default::default())
            }
        };
        let udp = ethernet.ip(header).udp(0xc000 | self.pair as u16, PORT);
        let mut frame = Vec::with_capacity(udp.size(datagram.len()));
        udp.write(&mut frame, datagram)
            .expect("a packet is no longer than a datagram, and a vector takes it");
        frame
    }
}

const fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// Returns the invariant CRC of a frame with room for it at its end; `None` if it is no RoCE frame.
///
/// It covers everything from the IP header on. Fields that routers may change count as ones, as
/// does the header that InfiniBand has instead of Ethernet's (RoCE v2, annex A17).
#[must_use]
pub fn invariant_crc(frame: &[u8]) -> Option<[u8; CRC]> {
    let (covered, _crc) = frame.get(ETHERNET..)?.split_last_chunk::<CRC>()?;
    let mut masked = covered.to_vec();
    let (changeable, header): (&[usize], usize) = match masked.first()? >> 4 {
        // Type of service, time to live, checksum.
        4 => (&[1, 8, 10, 11], 20),
        // Traffic class and flow label; hop limit.
        6 => {
            *masked.first_mut()? |= 0x0f;
            (&[1, 2, 3, 7], 40)
        }
        _ => return None,
    };
    // The checksum of UDP, and the byte of the BTH that marks congestion.
    for at in changeable.iter().copied().chain([header + 6, header + 7, header + UDP + 4]) {
        *masked.get_mut(at)? = 0xff;
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&[0xff; 8]);
    crc.update(&masked);
    Some(crc.finalize().to_le_bytes())
}
