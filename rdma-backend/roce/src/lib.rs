//! Messages of reliable connections as RoCE v2 packets, and files of packets for Wireshark.
//!
//! A [`Message`] is cut into [`Packet`]s, which become frames, which a [`File`] takes.
#![forbid(unsafe_code)]

mod file;
mod message;
mod packet;

pub use file::File;
pub use message::{MTU, Message, count};
pub use packet::{
    ACKNOWLEDGED, Kind, NOT_READY, Packet, SEQUENCES, answer, atomic, datagram, invariant_crc, refused,
    remote,
};
