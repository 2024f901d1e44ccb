//! What follows what in an RDB, as tables: the format of Valkey 9.1 (`rdb.h`), and of all before
//! it since version 5, which has checksums.

/// A piece of an RDB.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// So many bytes.
    Bytes(u64),
    /// A number, in one to nine bytes.
    Number,
    /// A string: a number and as many bytes, an integer, or a compressed string.
    Text,
    /// A score in digits: a byte that says how many, or which of three that have none.
    Score,
    /// A number, and as many times these pieces.
    Times(&'static [Self]),
    /// A number that names a database.
    Database,
    /// A number that names the type of a module.
    Module,
    /// Pieces of a module's value, each behind its kind, up to an end.
    Parts,
    /// The length of a compressed string, and then what it is without compression.
    Packed,
    Unpacked,
}

use Step::{Bytes, Database, Module, Number, Parts, Score, Text, Times};

/// A time, and the id of an entry of a stream.
const TIME: Step = Bytes(8);
const ID: Step = Bytes(16);

/// The entries of a stream, packed.
const ENTRIES: Step = Times(&[Text, Text]);

/// What a consumer group has delivered: id, time, and how often.
const DELIVERED: Step = Times(&[ID, TIME, Number]);

/// The consumers of a group, with one time and with two.
const CONSUMERS_1: Step = Times(&[Text, TIME, Times(&[ID])]);
const CONSUMERS_3: Step = Times(&[Text, TIME, TIME, Times(&[ID])]);

/// What follows the sign of a compressed string.
pub(super) const COMPRESSED: &[Step] = &[Step::Packed, Step::Unpacked];

/// Returns what follows an opcode that is neither a value's type nor the end.
pub(super) const fn opcode(code: u8) -> Option<&'static [Step]> {
    Some(match code {
        // Sizes of a slot of a cluster, a hint.
        244 => &[Number, Number, Number],
        // A library of functions.
        245 => &[Text],
        247 => &[Module, Number, Number, Parts],
        // Idle time, frequency, a named field, the sizes of a database, and expiry times.
        248 => &[Number],
        249 => &[Bytes(1)],
        250 => &[Text, Text],
        251 => &[Number, Number],
        252 => &[Bytes(8)],
        253 => &[Bytes(4)],
        254 => &[Database],
        _ => return None,
    })
}

/// Returns what follows the type of a value: its key, and the value.
pub(super) const fn value(kind: u8) -> Option<&'static [Step]> {
    Some(match kind {
        // A string; and hashes, lists, sets and sorted sets that are packed into one.
        0 | 9..=13 | 16 | 17 | 20 => &[Text, Text],
        // Lists, and sets.
        1 | 2 | 14 => &[Text, Times(&[Text])],
        3 => &[Text, Times(&[Text, Score])],
        4 => &[Text, Times(&[Text, Text])],
        5 => &[Text, Times(&[Text, Bytes(8)])],
        7 => &[Text, Module, Parts],
        15 => {
            &[Text, ENTRIES, Number, Number, Number, Times(&[Text, Number, Number, DELIVERED, CONSUMERS_1])]
        }
        18 => &[Text, Times(&[Number, Text])],
        19 => &[
            Text,
            ENTRIES,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Times(&[Text, Number, Number, Number, DELIVERED, CONSUMERS_1]),
        ],
        21 => &[
            Text,
            ENTRIES,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Number,
            Times(&[Text, Number, Number, Number, DELIVERED, CONSUMERS_3]),
        ],
        22 => &[Text, Times(&[Text, Text, TIME])],
        _ => return None,
    })
}
