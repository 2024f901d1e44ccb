//! Unreliable datagrams.
//!
//! A datagram is posted, read and completed like any other message, except that nothing answers it:
//! its own device is done with it once its bytes are read. The receiver's device keeps it until it
//! is stored in a receive, one after another, so that receives complete in order. Neither program
//! waits for the memory of the other.

use std::net::IpAddr;

use rdma_backend::{Immediate, SendOp};

use super::path::Path;
use crate::model::flights::freight::Held;
use crate::model::queues::completion::Source;

/// The most bytes of a datagram.
pub(in crate::model) const MTU: usize = 4096;
/// The bytes in front of those of a datagram, in its receive: the network header (GRH).
pub(in crate::model) const HEADER: usize = 40;
/// The most datagrams that wait at a queue pair until an earlier one is stored.
pub(in crate::model) const MOST_WAITING: usize = 64;

/// A datagram at the device of its receiver.
pub(in crate::model) struct Datagram {
    /// The header and the sent bytes, until they are moved.
    pub(in crate::model) bytes: Vec<u8>,
    pub(in crate::model) len: u32,
    pub(in crate::model) source: Source,
    pub(in crate::model) immediate: Option<Immediate>,
    pub(in crate::model) solicited: bool,
    pub(in crate::model) _held: Held,
}

/// Returns the immediate of a SEND.
pub(in crate::model) const fn sent_immediate(op: SendOp) -> Option<Immediate> {
    match op {
        SendOp::SendImmediate(immediate) => Some(immediate),
        _ => None,
    }
}

/// Returns the network header of a datagram as receivers see it: that of IPv6, or in its last bytes
/// that of IPv4 (annex A17 of the InfiniBand architecture). `len` counts the immediate and padding.
pub(in crate::model) fn header(path: Path, len: usize) -> [u8; HEADER] {
    /// UDP, the transport headers and the checksum.
    const AROUND: usize = 8 + 12 + 8 + 4;
    const UDP: u8 = 17;
    const HOPS: u8 = 64;
    let mut header = [0; HEADER];
    let length = |len: usize| u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes();
    match (path.local, path.remote) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = length(20 + AROUND + len);
            // Without options, and not to be fragmented (RFC 791).
            let start = [0x45, 0, high, low, 0, 0, 0x40, 0, HOPS, UDP, 0, 0];
            let (_undefined, ip) = header.split_at_mut(20);
            for (to, byte) in ip.iter_mut().zip(start.into_iter().chain(from.octets()).chain(to.octets())) {
                *to = byte;
            }
            let words =
                ip.chunks_exact(2).map(|pair| pair.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)));
            // The ones' complement sum of its words (RFC 1071).
            let sum: u32 = words.sum();
            // Folded twice, because the first sum of the halves may carry again.
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
            for (to, byte) in ip.iter_mut().skip(10).zip(checksum.to_be_bytes()) {
                *to = byte;
            }
        }
        (from, to) => {
            let [high, low] = length(AROUND + len);
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let start = [0x60, 0, 0, 0, high, low, UDP, HOPS];
            for (to, byte) in header.iter_mut().zip(start.into_iter().chain(v6(from)).chain(v6(to))) {
                *to = byte;
            }
        }
    }
    header
}
