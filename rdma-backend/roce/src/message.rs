//! Messages, cut into packets.

use crate::packet::{Kind, Packet, SEQUENCES};

/// Bytes of payload in a packet.
pub const MTU: usize = 4096;

/// Returns how many packets a message of `len` bytes takes, at least one.
#[must_use]
pub fn count(len: usize) -> u32 {
    u32::try_from(len.div_ceil(MTU).max(1)).unwrap_or(u32::MAX)
}

/// A message of bytes: a SEND, a WRITE, or the answer to a READ.
#[derive(Clone, Debug)]
pub struct Message<'a> {
    /// The operation.
    pub kind: Kind,
    /// Headers of the first packet, and of the last answer to a READ.
    pub start: Vec<u8>,
    /// The immediate of the last packet.
    pub immediate: Option<u32>,
    /// The known bytes.
    pub bytes: &'a [u8],
    /// The total number of bytes.
    pub len: usize,
}

impl Message<'_> {
    /// Returns the packets, from `sequence` on, without addresses: see [`Packet::between`].
    pub fn packets(&self, sequence: u32) -> impl Iterator<Item = Packet<'_>> {
        let packets = count(self.len);
        (0..packets).map(move |number| {
            let (first, last) = (number == 0, number + 1 == packets);
            let begin = number as usize * MTU;
            let answers = self.kind == Kind::ReadResponse;
            let mut headers = if first || (last && answers) { self.start.clone() } else { Vec::new() };
            if let (true, Some(immediate)) = (last, self.immediate) {
                headers.extend(immediate.to_be_bytes());
            }
            Packet {
                acknowledge: last && !answers,
                headers,
                payload: self.bytes.get(begin..).unwrap_or_default(),
                len: self.len.saturating_sub(begin).min(MTU),
                ..Packet::new(
                    self.kind.opcode(first, last, self.immediate.is_some()),
                    sequence.wrapping_add(number) % SEQUENCES,
                )
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opcode, sequence number, headers, bytes, and whether to acknowledge it, of each packet.
    fn cut(message: &Message<'_>, sequence: u32) -> Vec<(u8, u32, usize, usize, bool)> {
        let seen = |packet: Packet<'_>| {
            (packet.opcode, packet.sequence, packet.headers.len(), packet.len, packet.acknowledge)
        };
        message.packets(sequence).map(seen).collect()
    }

    #[test]
    fn a_message_is_cut_where_a_packet_is_full() {
        let write =
            |len| Message { kind: Kind::Write, start: vec![0; 16], immediate: Some(7), bytes: &[], len };
        assert_eq!(cut(&write(0), 5), [(11, 5, 20, 0, true)]);
        assert_eq!(cut(&write(MTU), 5), [(11, 5, 20, MTU, true)]);
        let last = SEQUENCES - 1;
        let three = [(6, last, 16, MTU, false), (7, 0, 0, MTU, false), (9, 1, 4, 1, true)];
        assert_eq!(cut(&write(2 * MTU + 1), last), three);
        let answer =
            Message { kind: Kind::ReadResponse, start: vec![0; 4], immediate: None, ..write(MTU + 1) };
        assert_eq!(cut(&answer, 0), [(13, 0, 4, MTU, false), (15, 1, 4, 1, false)]);
    }
}
