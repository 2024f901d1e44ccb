//! The wire format, compared with golden bytes and with byteorder as an independent encoder.

use byteorder::{BigEndian, ByteOrder};
use proptest::prelude::*;
use rdma_proto::InvalidMessage;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Opcode, Window};

fn hex(text: &str) -> [u8; MESSAGE_LEN] {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let bytes: Vec<u8> = digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    bytes.try_into().expect("32 bytes")
}

/// The bytes that a Valkey server and libvalkey put on the wire (VR-CTRL-001 to 004).
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

/// Encodes as the C struct does, field by field.
fn oracle(message: &Message) -> [u8; MESSAGE_LEN] {
    let mut bytes = [0; MESSAGE_LEN];
    match *message {
        Message::GetServerFeature { select, features } | Message::SetClientFeature { select, features } => {
            BigEndian::write_u16(&mut bytes[2..4], select);
            BigEndian::write_u64(&mut bytes[24..32], features.0);
        }
        Message::Keepalive => {}
        Message::RegisterXferMemory(window) => {
            BigEndian::write_u64(&mut bytes[16..24], window.address);
            BigEndian::write_u32(&mut bytes[24..28], window.length);
            BigEndian::write_u32(&mut bytes[28..32], window.rkey);
        }
    }
    let opcode = match message {
        Message::GetServerFeature { .. } => 0,
        Message::SetClientFeature { .. } => 1,
        Message::Keepalive => 2,
        Message::RegisterXferMemory(_) => 3,
    };
    BigEndian::write_u16(&mut bytes[0..2], opcode);
    bytes
}

fn any_message() -> impl Strategy<Value = Message> {
    let features = any::<(u16, u64)>();
    prop_oneof![
        features.prop_map(|(select, bits)| Message::GetServerFeature { select, features: FeatureSet(bits) }),
        features.prop_map(|(select, bits)| Message::SetClientFeature { select, features: FeatureSet(bits) }),
        Just(Message::Keepalive),
        any::<(u64, u32, u32)>().prop_map(|(address, length, rkey)| {
            Message::RegisterXferMemory(Window { address, length, rkey })
        }),
    ]
}

proptest! {
    #[test]
    fn encoder_agrees_with_the_oracle_and_decodes_back(message in any_message()) {
        prop_assert_eq!(message.encode(), oracle(&message));
        prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
    }

    /// Any 32 bytes are read without harm. A decoded message keeps every byte that has a meaning
    /// (VR-CTRL-006), and an unknown opcode is preserved.
    #[test]
    fn any_bytes_decode(bytes in any::<[u8; MESSAGE_LEN]>(), small in 0..6_u16, keep in any::<bool>()) {
        let mut bytes = bytes;
        if keep {
            BigEndian::write_u16(&mut bytes[0..2], small);
        }
        let opcode = BigEndian::read_u16(&bytes[0..2]);
        match Message::decode(&bytes) {
            Ok(message) => {
                prop_assert_eq!(message.opcode(), Opcode(opcode));
                let canonical = oracle(&message);
                match message {
                    Message::GetServerFeature { .. } | Message::SetClientFeature { .. } => {
                        prop_assert_eq!(&canonical[..4], &bytes[..4]);
                        prop_assert_eq!(&canonical[24..], &bytes[24..]);
                    }
                    Message::Keepalive => {}
                    Message::RegisterXferMemory(_) => prop_assert_eq!(&canonical[16..], &bytes[16..]),
                }
            }
            Err(error) => {
                prop_assert!(opcode > 3);
                prop_assert_eq!(error, InvalidMessage::UnknownOpcode { opcode: Opcode(opcode) });
            }
        }
    }
}

#[test]
fn opcodes_have_names() {
    let names = ["GetServerFeature", "SetClientFeature", "Keepalive", "RegisterXferMemory", "opcode 0x0004"];
    for (number, name) in (0..).zip(names) {
        assert_eq!(Opcode(number).to_string(), name);
    }
}
