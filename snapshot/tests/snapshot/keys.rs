//! Keys of every kind, and a comparison of two Valkeys.

use redis::{Connection, Value, cmd, pipe};

/// Fills a Valkey with everything it supports: every type in its small and its large encoding, TTLs
/// of keys and of fields, streams with groups and pending entries, functions, several databases,
/// binary keys, and a value of `long` bytes.
pub(crate) fn fill(source: &mut Connection, long: usize) {
    let mut pipe = pipe();
    for index in 0..2000 {
        pipe.cmd("SET").arg(format!("string:{index}")).arg(format!("value {index}")).ignore();
        pipe.cmd("HSET").arg("hash:large").arg(index).arg(index * 7).ignore();
        pipe.cmd("RPUSH").arg("list:large").arg(format!("element {index}")).ignore();
        pipe.cmd("SADD").arg("set:large").arg(format!("member {index}")).ignore();
        pipe.cmd("ZADD").arg("zset:large").arg(index as f64 / 3.0).arg(format!("member {index}")).ignore();
        pipe.cmd("XADD").arg("stream").arg(format!("{}-1", index + 1)).arg("field").arg(index).ignore();
    }
    pipe.cmd("SET").arg("integer").arg(123_456_789).ignore();
    pipe.cmd("SET").arg(&b"binary \0\xff\r\n key"[..]).arg(&b"\0\x01\xfe\xff\r\n"[..]).ignore();
    pipe.cmd("SET").arg("long").arg(incompressible(long)).ignore();
    pipe.cmd("SET").arg("expires").arg("x").arg("PX").arg(86_400_123).ignore();
    pipe.cmd("HSET").arg("hash:small").arg("a").arg(1).arg("b").arg(2).arg("c").arg(3).ignore();
    pipe.cmd("EXPIRE").arg("hash:small").arg(100_000).ignore();
    pipe.cmd("RPUSH").arg("list:small").arg(1).arg("two").arg(3.5).ignore();
    pipe.cmd("SADD").arg("set:integers").arg(1).arg(-2).arg(300_000).ignore();
    pipe.cmd("SADD").arg("set:small").arg("a").arg("b").ignore();
    pipe.cmd("ZADD").arg("zset:small").arg("-inf").arg("a").arg(1.5).arg("b").arg("+inf").arg("c").ignore();
    pipe.cmd("PFADD").arg("hll").arg("a").arg("b").ignore();
    pipe.cmd("XGROUP").arg("CREATE").arg("stream").arg("group").arg(0).ignore();
    pipe.cmd("XREADGROUP").arg(&["GROUP", "group", "one", "COUNT", "10", "STREAMS", "stream", ">"]).ignore();
    pipe.cmd("XACK").arg("stream").arg("group").arg("1-1").arg("2-1").ignore();
    pipe.cmd("XGROUP").arg("CREATECONSUMER").arg("stream").arg("group").arg("two").ignore();
    pipe.cmd("XDEL").arg("stream").arg("5-1").ignore();
    let library = "#!lua name=library\nserver.register_function('answer', function() return 42 end)";
    pipe.cmd("FUNCTION").arg("LOAD").arg(library).ignore();
    for database in 1..4 {
        pipe.cmd("SELECT").arg(database).ignore();
        pipe.cmd("SET").arg("where").arg(database).ignore();
    }
    pipe.cmd("SELECT").arg(0).ignore();
    pipe.exec(source).expect("a source that takes writes");
    // Fields have TTLs since Valkey 9.
    for command in [
        &["HEXPIRE", "hash:small", "50000", "FIELDS", "1", "a"][..],
        &["HPEXPIRE", "hash:large", "60000123", "FIELDS", "1", "7"],
    ] {
        let mut command = command.iter();
        let name = command.next().expect("a name");
        if let Err(error) = cmd(name).arg(command.collect::<Vec<_>>()).exec(source) {
            println!("without TTLs of fields: {error}");
        }
    }
}

/// Bytes that an RDB cannot make shorter.
fn incompressible(count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()
    };
    (0..count / 4).flat_map(|_| next().into_iter().take(4)).collect()
}

/// Asserts that both have the same data: by Valkey's digest, and key by key.
pub(crate) fn assert_equal(source: &mut Connection, target: &mut Connection) {
    let digest = |one: &mut Connection| cmd("DEBUG").arg("DIGEST").query::<String>(one).expect("a digest");
    assert_eq!(digest(source), digest(target));
    let functions =
        |one: &mut Connection| cmd("FUNCTION").arg("DUMP").query::<Vec<u8>>(one).expect("functions");
    assert_eq!(functions(source), functions(target));
    let mut count = 0;
    for database in 0..4 {
        for one in [&mut *source, &mut *target] {
            cmd("SELECT").arg(database).exec(one).expect("a database");
        }
        let keys: Vec<Vec<u8>> = cmd("KEYS").arg("*").query(source).expect("keys");
        let size: usize = cmd("DBSIZE").query(target).expect("a size");
        assert_eq!(keys.len(), size, "database {database}");
        for keys in keys.chunks(100) {
            let [theirs, ours] = [&mut *source, &mut *target].map(|one| look(one, keys));
            for ((key, theirs), ours) in keys.iter().zip(theirs).zip(ours) {
                // A DUMP may be long.
                assert!(theirs == ours, "{} differs", String::from_utf8_lossy(key));
            }
        }
        count += keys.len();
    }
    assert!(count > 2000, "{count} keys");
    for one in [source, target] {
        cmd("SELECT").arg(0).exec(one).expect("a database");
    }
}

/// A Valkey's description of a key.
#[derive(PartialEq)]
struct Told {
    kind: String,
    expires: i64,
    digest: Value,
    encoding: String,
    dump: Vec<u8>,
}

fn look(valkey: &mut Connection, keys: &[Vec<u8>]) -> Vec<Told> {
    let mut pipe = pipe();
    for key in keys {
        for words in
            [&["TYPE"][..], &["PEXPIRETIME"], &["DEBUG", "DIGEST-VALUE"], &["OBJECT", "ENCODING"], &["DUMP"]]
        {
            pipe.cmd(words[0]).arg(&words[1..]).arg(key);
        }
    }
    let answers: Vec<Value> = pipe.query(valkey).expect("answers");
    let told = answers.chunks_exact(5).map(|answers| {
        let [kind, expires, digest, encoding, dump] = answers else { unreachable!("five for each key") };
        let text = |value: &Value| redis::from_redis_value_ref::<String>(value).expect("text");
        // A short string that was changed in place is created again when it is loaded, as in every
        // replica.
        let encoding = text(encoding).replace("raw", "embstr");
        let mut dump: Vec<u8> = redis::from_redis_value_ref(dump).expect("a dump");
        // The order of a hash table depends on the process. Its dump then has the same bytes in
        // another order, except for the CRC at the end.
        if encoding == "hashtable" {
            dump.truncate(dump.len().saturating_sub(8));
            dump.sort_unstable();
        }
        let expires = redis::from_redis_value_ref(expires).expect("a time");
        Told { kind: text(kind), expires, digest: digest.clone(), encoding, dump }
    });
    told.collect()
}
