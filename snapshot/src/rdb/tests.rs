//! RDBs of every type and of none, damaged ones, and arbitrary bytes.

use proptest::prelude::*;

use super::*;

/// An RDB with nothing in it.
pub(crate) const EMPTY: &[u8] = b"REDIS0011\xff\xc0\x22\x8a\x8d\x74\x38\x97\x62";

/// The same, of a Valkey with `rdbchecksum no`.
pub(crate) fn unsummed() -> Vec<u8> {
    [&EMPTY[..10], &[0; CHECKSUM]].concat()
}

/// Returns an RDB with a right checksum.
pub(crate) fn summed(header: &[u8], body: &[u8]) -> Vec<u8> {
    let mut all = [header, body, b"\xff"].concat();
    let mut sum = checksum();
    sum.update(&all);
    all.extend(sum.finalize().to_le_bytes());
    all
}

fn checked(pieces: &[&[u8]]) -> Result<Needs, Invalid> {
    let mut check = Check::default();
    for piece in pieces {
        check.update(piece)?;
    }
    check.finish()
}

/// A value of every type, and every opcode.
fn full() -> Vec<u8> {
    let id = [0; 16];
    let time = [1; 8];
    let delivered = [&b"\x01"[..], &id, &time, b"\x02"].concat();
    let consumers = |times: usize| [b"\x01\x01c", &time.repeat(times)[..], b"\x01", &id].concat();
    let entries = b"\x01\x02id\x02lp";
    let body = [
        b"\xfa\x09redis-ver\x059.1.2",
        // A module's own data, with a part of each kind.
        &b"\xf7\x81"[..],
        &type_id(),
        b"\x02\x01\x01\x40\x40\x02\x05\x03\0\0\0\0\x04\0\0\0\0\0\0\0\0\x05\x02ab\0",
        b"\xf5\x07library\xf4\x01\x02\x03\xfe\x03\xfb\x40\x80\x01",
        // Strings of every kind, of several lengths, with times and frequency.
        b"\xfd\0\0\0\0\x00\x01k\x00",
        b"\xfc\0\0\0\0\0\0\0\0\xf9\x05\x00\xc0\x01\xc1\x01\x02",
        b"\xf8\x05\x00\xc2\x01\x02\x03\x04\xc3\x04\x0a\x01a\xe0\0",
        b"\x00\x40\x41",
        &[b'k'; 65],
        b"\x80\0\0\0\x02vv",
        b"\x00\x81\0\0\0\0\0\0\0\x01k\x01v",
        // Lists and sets, of elements and packed.
        b"\x01\x01k\x02\x01a\x01b\x02\x01k\x01\xc0\x05\x0e\x01k\x02\x02zl\x02zl\x12\x01k\x02\x01\x01a\x02\x02lp",
        // Sorted sets, hashes, and what is packed.
        b"\x03\x01k\x04\x01a\x03\x31.5\x01b\xfe\x01c\xff\x01d\x00\x04\x01k\x01\x01f\x01v",
        b"\x05\x01k\x01\x01a\0\0\0\0\0\0\0\0\x16\x01k\x01\x01f\x01v\0\0\0\0\0\0\0\0",
        b"\x09\x01k\x01z\x0a\x01k\x01z\x0b\x01k\x01z\x0c\x01k\x01z\x0d\x01k\x01z\x10\x01k\x01z\x11\x01k\x01z\x14\x01k\x01z",
        b"\x07\x01k\x81",
        &type_id(),
        b"\x01\x05\0",
        b"\x0f\x01k",
        entries,
        b"\x01\x02\x03\x01\x01g\x01\x02",
        &delivered,
        &consumers(1),
        b"\x13\x01k",
        entries,
        b"\x01\x02\x03\x04\x05\x06\x07\x08\x01\x01g\x01\x02\x03",
        &delivered,
        &consumers(1),
        b"\x15\x01k",
        entries,
        b"\x01\x02\x03\x04\x05\x06\x07\x08\x01\x01g\x01\x02\x03",
        &delivered,
        &consumers(2),
        b"\x01\x01k\x00",
    ]
    .concat();
    summed(b"VALKEY080", &body)
}

/// The id of the type `module-ty`, version 3.
fn type_id() -> [u8; 8] {
    let six = |byte: u8| match byte {
        b'a'..=b'z' => u64::from(byte - b'a') + 26,
        _ => 62,
    };
    (b"module-ty".iter().fold(0, |id, byte| id << 6 | six(*byte)) << 10 | 3).to_be_bytes()
}

/// The CRC is that of RDBs: this is the vector of Valkey's own test.
#[test]
fn the_checksum_is_that_of_rdbs() {
    let mut sum = checksum();
    sum.update(b"123456789");
    assert_eq!(sum.finalize(), 0xe9c6_d914_c4b8_d9ca);
    assert_eq!(summed(b"REDIS0011", b""), EMPTY);
}

/// An RDB is right in whichever pieces it comes, and says what it needs.
#[test]
fn every_type_is_walked_over_in_any_pieces() {
    assert_eq!(checked(&[EMPTY]), Ok(Needs { version: 11, database: 0, module: None }));
    let all = full();
    let needs = Ok(Needs { version: 80, database: 3, module: Some(*b"module-ty") });
    assert_eq!(checked(&[&all]), needs);
    for at in 0..=all.len() {
        let (before, behind) = all.split_at(at);
        assert_eq!(checked(&[before, behind]), needs, "at {at}");
    }
    assert_eq!(checked(&all.chunks(1).collect::<Vec<_>>()), needs);
}

/// An RDB that is empty, cut, longer, or has one changed byte, is none.
#[test]
fn no_damaged_rdb_is_one() {
    for all in [EMPTY.to_vec(), full()] {
        for len in 0..all.len() {
            assert_eq!(checked(&[&all[..len]]), Err(Invalid::Cut { bytes: len as u64 }));
        }
        assert!(matches!(checked(&[&all, b"\n"]), Err(Invalid::Longer { .. })));
        for at in 0..all.len() {
            for bit in 0..8 {
                let mut damaged = all.clone();
                damaged[at] ^= 1 << bit;
                assert!(checked(&[&damaged]).is_err(), "bit {bit} of byte {at}");
            }
        }
    }
    assert_eq!(checked(&[&unsummed()]), Err(Invalid::Unsummed));
    assert_eq!(checked(&[b"*1\r\n$4\r\nPING\r\n"]), Err(Invalid::Foreign));
}

/// With a right checksum, too, nothing is an RDB that a Valkey would refuse by its structure.
#[test]
fn a_right_checksum_does_not_make_an_rdb() {
    for (header, error) in [
        (b"REDIS00x1", Invalid::Foreign),
        (b"REDIS0004", Invalid::Version(4)),
        (b"REDIS0012", Invalid::Version(12)),
        (b"REDIS0080", Invalid::Version(80)),
        (b"VALKEY011", Invalid::Version(11)),
        (b"VALKEY081", Invalid::Version(81)),
    ] {
        assert_eq!(checked(&[&summed(header, b"")]), Err(error));
    }
    for (body, is_refused) in [
        // Other types, and those of release candidates, and what is a cluster's.
        (&b"\x08\x01k\x01v"[..], false),
        (b"\x17\x01k\x01v", false),
        (b"\xf2", false),
        (b"\x06\x01k", true),
        (b"\xf6", true),
        (b"\xf3\x01n\0", true),
        // A later type in an older version, a string in the place of a number, other numbers.
        (b"\x16\x01k\x01\x01f\x01v\0\0\0\0\0\0\0\0", false),
        (b"\x01\x01k\xc0", false),
        (b"\x00\x82", false),
        (b"\x00\xc4", false),
        (b"\x07\x01k\x05\x06", false),
        (b"\x03\x01k\x01\x01a\xfd", true),
        // A compressed string that would be longer than it can be.
        (b"\x00\x01k\xc3\x01\x40\x59\0", true),
    ] {
        let error = checked(&[&summed(b"REDIS0011", body)]).expect_err("no RDB");
        assert_eq!(matches!(error, Invalid::Refused { .. }), is_refused, "{body:?}: {error}");
    }
    // Lengths and counts beyond what follows.
    for body in [
        &b"\x00\x01k\x40\xff"[..],
        b"\x01\x01k\x81\xff\xff\xff\xff\xff\xff\xff\xff\x01a",
        b"\x04\x01k\x02\x01f\x01v",
    ] {
        let all = summed(b"REDIS0011", body);
        assert!(matches!(checked(&[&all]), Err(Invalid::Cut { .. } | Invalid::Unknown { .. })), "{body:?}");
    }
}

proptest! {
    /// Arbitrary bytes cause no panic, and no state that grows with them.
    #[test]
    fn arbitrary_bytes_are_checked(bytes in prop::collection::vec(any::<u8>(), 0..500), cuts in prop::collection::vec(0..500_usize, 0..8)) {
        for header in [&b"REDIS0011"[..], b"VALKEY080", b""] {
            let all = [header, &bytes].concat();
            let mut check = Check::default();
            let mut rest = &all[..];
            for cut in &cuts {
                let (now, later) = rest.split_at(rest.len().min(*cut));
                rest = later;
                let outcome = check.update(now);
                prop_assert!(check.walk.depth() <= 5);
                if outcome.is_err() {
                    return Ok(());
                }
            }
            let _outcome = check.update(rest).and_then(|()| check.finish());
        }
    }
}
