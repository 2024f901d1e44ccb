//! Compares with a reader and a writer made with byteorder alone.

use byteorder::{BigEndian, ByteOrder};
use rdma_proto::InvalidMessage;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Opcode, Window};

pub(crate) fn run(input: &[u8]) {
    let expected = read(input);
    assert_eq!(Message::decode(input), expected);
    let Ok(message) = expected else { return };
    let mut canonical = [0; MESSAGE_LEN];
    for (start, end) in fields(message.opcode()) {
        canonical[*start..*end].copy_from_slice(&input[*start..*end]);
    }
    assert_eq!(message.encode(), canonical, "the same without what is reserved");
    assert_eq!(Message::decode(&canonical), Ok(message));
}

fn read(bytes: &[u8]) -> Result<Message, InvalidMessage> {
    if bytes.len() != MESSAGE_LEN {
        return Err(InvalidMessage::Length { length: bytes.len() });
    }
    let select = BigEndian::read_u16(&bytes[2..4]);
    let features = FeatureSet(BigEndian::read_u64(&bytes[24..32]));
    match BigEndian::read_u16(&bytes[0..2]) {
        0 => Ok(Message::GetServerFeature { select, features }),
        1 => Ok(Message::SetClientFeature { select, features }),
        2 => Ok(Message::Keepalive),
        3 => Ok(Message::RegisterXferMemory(Window {
            address: BigEndian::read_u64(&bytes[16..24]),
            length: BigEndian::read_u32(&bytes[24..28]),
            rkey: BigEndian::read_u32(&bytes[28..32]),
        })),
        opcode => Err(InvalidMessage::UnknownOpcode { opcode: Opcode(opcode) }),
    }
}

fn fields(opcode: Opcode) -> &'static [(usize, usize)] {
    match opcode.0 {
        0 | 1 => &[(0, 4), (24, 32)],
        2 => &[(0, 2)],
        _ => &[(0, 2), (16, 32)],
    }
}
