//! The wire format, compared with golden bytes and with byteorder as an independent encoder.

use proptest::prelude::*;
use rdma_proto::InvalidMessage;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Opcode, Window};

use crate::bodies;

fn hex(text: &str) -> [u8; MESSAGE_LEN] {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let bytes: Vec<u8> = digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    bytes.try_into().expect("32 bytes")
}

/// VR-CTRL-001 to 004: what Valkey and libvalkey put on the wire.
#[test]
fn golden_bytes() {
    let zeros = "00".repeat(28);
    let golden = [
        (Message::GetServerFeature { select: 0, features: FeatureSet::NONE }, hex(&"00".repeat(32))),
        (
            Message::GetServerFeature { select: 0x0102, features: FeatureSet::NONE },
            hex(&format!("0000 0102 {zeros}")),
        ),
        (
            Message::SetClientFeature { select: 0, features: FeatureSet(1) },
            hex(&format!("0001 0000 {} 00 00 00 00 00 00 00 01", "00".repeat(20))),
        ),
        (Message::Keepalive, hex(&format!("0002 {}", "00".repeat(30)))),
        (
            Message::RegisterXferMemory(Window {
                address: 0x0000_7f12_3456_0000,
                length: 1 << 20,
                rkey: 0xabcd,
            }),
            hex(&format!("0003 {} 0000 7f12 3456 0000 0010 0000 0000 abcd", "00".repeat(14))),
        ),
    ];
    for (message, bytes) in golden {
        assert_eq!(message.encode(), bytes, "{message:?}");
        assert_eq!(Message::decode(&bytes), Ok(message));
    }
}

#[test]
fn every_wrong_length_is_refused() {
    for length in (0..128).filter(|length| *length != MESSAGE_LEN) {
        assert_eq!(Message::decode(&vec![0; length]), Err(InvalidMessage::Length { length }));
    }
}

proptest! {
    /// As byteorder reads and writes them: a decoded message keeps every byte that has a meaning
    /// (VR-CTRL-006), and an unknown opcode is preserved.
    #[test]
    fn any_bytes_decode(bytes in any::<[u8; MESSAGE_LEN]>(), small in 0..6_u8, keep in any::<bool>()) {
        let mut bytes = bytes;
        if keep {
            bytes[..2].copy_from_slice(&[0, small]);
        }
        bodies::control_messages::run(&bytes);
    }
}

#[test]
fn opcodes_have_names() {
    let names = ["GetServerFeature", "SetClientFeature", "Keepalive", "RegisterXferMemory", "opcode 0x0004"];
    for (number, name) in (0..).zip(names) {
        assert_eq!(Opcode(number).to_string(), name);
    }
}
