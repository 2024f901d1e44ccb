//! Requests that the other side's device refuses, and the errors it reports.

use crate::Descriptors;
use rdma_backend::{
    Access, Completed, CompletionStatus, Domain as _, Identifier as _, Immediate, QueuePair as _,
    RecvRequest, RemoteAddress, SendOp, Slice,
};

use super::Setting;
use super::ends::{Called, End, LEN, ONE, Pair, SLOT, Shape, equal, read, remote};
use crate::Failure;

super::table! {
    "verbs.access.bad-key", "an unknown key is refused with REM_ACCESS_ERR",
        "ibv_poll_cq(3), IBA 9.9.3", bad_key;
    "verbs.access.beyond-end", "a byte beyond the end of a region is refused with REM_ACCESS_ERR",
        "ibv_reg_mr(3)", beyond_end;
    "verbs.access.before-start", "a byte before the start of a region is refused with REM_ACCESS_ERR",
        "ibv_reg_mr(3)", before_start;
    "verbs.access.other-domain", "a region of another domain is refused with REM_ACCESS_ERR",
        "ibv_alloc_pd(3)", other_domain;
    "verbs.access.write-not-allowed", "a WRITE without REMOTE_WRITE is refused with REM_ACCESS_ERR",
        "ibv_reg_mr(3)", write_not_allowed;
    "verbs.access.read-not-allowed", "a READ without REMOTE_READ is refused with REM_ACCESS_ERR",
        "ibv_reg_mr(3)", read_not_allowed;
    "verbs.access.deregistered", "a region is refused with REM_ACCESS_ERR as soon as it is deregistered",
        "ibv_dereg_mr(3)", deregistered;
    "verbs.access.nothing-written", "a refused WRITE writes nothing", "IBA 9.7.4.1.2", nothing_written;
    "verbs.access.both-in-error", "a refusal puts both queue pairs into the error state",
        "IBA 9.9.3 (class C)", both_in_error;
    "verbs.access.immediate-receive", "a receive consumed by a refused WRITE fails with LOC_ACCESS_ERR",
        "ibv_poll_cq(3)", immediate_receive;
    "verbs.length.sender", "a SEND longer than its receive fails with REM_INV_REQ_ERR",
        "ibv_poll_cq(3)", too_long_sender;
    "verbs.length.receiver", "a receive shorter than its SEND fails with LOC_LEN_ERR",
        "ibv_poll_cq(3)", too_long_receiver;
    "verbs.length.nothing-beyond", "a SEND longer than its receive writes nothing beyond that",
        "ibv_post_recv(3)", too_long_bytes;
    "verbs.receive-memory.gone-sender", "a SEND to a receive whose memory is gone fails with REM_OP_ERR",
        "ibv_poll_cq(3)", gone_sender;
    "verbs.receive-memory.gone-receiver", "a receive whose memory is gone fails with LOC_PROT_ERR",
        "ibv_poll_cq(3)", gone_receiver;
    "verbs.receive-memory.not-writable", "a receive in memory without LOCAL_WRITE is refused",
        "ibv_reg_mr(3)", not_writable;
}

fn refused<B: Descriptors>(
    setting: &Setting<B>,
    op: impl FnOnce(&End<B>) -> Result<SendOp, Failure>,
) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(op(server)?, 0, 4)?;
    client.fails("the requester", ONE, CompletionStatus::REM_ACCESS_ERR)
}

fn bad_key<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let wrong = |address: RemoteAddress| RemoteAddress { rkey: !address.rkey, ..address };
    refused(setting, |server| Ok(SendOp::Write(wrong(server.remote(0)))))?;
    refused(setting, |server| Ok(SendOp::Read(wrong(server.remote(0)))))
}

fn beyond_end<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    refused(setting, |server| Ok(SendOp::Write(server.remote(LEN - 3))))?;
    refused(setting, |server| Ok(SendOp::Read(server.remote(LEN - 3))))
}

fn before_start<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let before = |end: &End<B>| RemoteAddress { address: end.remote(0).address - 1, ..end.remote(0) };
    refused(setting, |server| Ok(SendOp::Write(before(server))))?;
    refused(setting, |server| Ok(SendOp::Read(before(server))))
}

/// The region, with this access in `domain`, lives until it is refused.
fn region_refuses<B: Descriptors>(
    setting: &Setting<B>,
    access: Access,
    domain: impl FnOnce(&End<B>) -> Result<Option<B::Domain>, Failure>,
    op: fn(RemoteAddress) -> SendOp,
) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let other = domain(server)?;
    let domain = other.as_ref().unwrap_or(&server.domain);
    let region = domain.register(64, access).called("register")?;
    client.post_one(op(remote::<B>(&region, 0)), 0, 4)?;
    client.fails("the requester", ONE, CompletionStatus::REM_ACCESS_ERR)?;
    equal("the bytes", read::<B>(&region, 0, 64)?, vec![0; 64])
}

fn other_domain<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let other = |end: &End<B>| end.id.create_domain().called("create_domain").map(Some);
    region_refuses(setting, Access::REMOTE_WRITE, other, SendOp::Write)?;
    region_refuses(setting, Access::REMOTE_READ, other, SendOp::Read)
}

fn write_not_allowed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    [Access::NONE, Access::LOCAL_WRITE, Access::REMOTE_READ]
        .into_iter()
        .try_for_each(|access| region_refuses(setting, access, |_| Ok(None), SendOp::Write))
}

fn read_not_allowed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    [Access::NONE, Access::LOCAL_WRITE, Access::REMOTE_WRITE]
        .into_iter()
        .try_for_each(|access| region_refuses(setting, access, |_| Ok(None), SendOp::Read))
}

fn deregistered<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let region = server.domain.register(64, Access::REMOTE_WRITE).called("register")?;
    let target = remote::<B>(&region, 0);
    client.post_one(SendOp::Write(target), 0, 4)?;
    client.completes("while it is there", ONE, Completed::Write)?;
    drop(region);
    client.post_one(SendOp::Write(target), 0, 4)?;
    client.fails("when it is gone", ONE, CompletionStatus::REM_ACCESS_ERR)
}

fn nothing_written<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(SendOp::Write(server.remote(LEN - 999)), 3, 1000)?;
    client.fails("the requester", ONE, CompletionStatus::REM_ACCESS_ERR)?;
    equal("the bytes", server.bytes(0, LEN)?, (0..LEN).map(|index| index as u8).collect())
}

fn both_in_error<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(
        SendOp::Write(RemoteAddress { rkey: !server.remote(0).rkey, ..server.remote(0) }),
        0,
        4,
    )?;
    client.fails("the requester", ONE, CompletionStatus::REM_ACCESS_ERR)?;
    client.flushes("the requester's receives", 0..8)?;
    server.flushes("the refuser's receives", 0..8)
}

fn immediate_receive<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let target = RemoteAddress { rkey: !server.remote(0).rkey, ..server.remote(0) };
    client.post_one(SendOp::WriteImmediate(target, Immediate(4)), 0, 4)?;
    client.fails("the requester", ONE, CompletionStatus::REM_ACCESS_ERR)?;
    server.fails("the receive", 0, CompletionStatus::LOC_ACCESS_ERR)
}

fn too_long<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    let pair = setting.pair()?;
    pair.client.post_one(SendOp::Send, 0, SLOT + 1)?;
    Ok(pair)
}

fn too_long_sender<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    too_long(setting)?.client.fails("the sender", ONE, CompletionStatus::REM_INV_REQ_ERR)
}

fn too_long_receiver<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    too_long(setting)?.server.fails("the receiver", 0, CompletionStatus::LOC_LEN_ERR)
}

fn too_long_bytes<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = too_long(setting)?;
    client.completion("the sender")?;
    equal("the next receive's memory", server.received(1, SLOT)?, vec![0; SLOT])
}

fn gone<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    let pair = setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    let Pair { server, client, .. } = &pair;
    let region = server.domain.register(64, Access::LOCAL_WRITE).called("register")?;
    let local = Slice { region: &region, offset: 0, len: 64 };
    server.qp.post_recv(&[RecvRequest { id: 1, local }]).map_err(|error| error.error).called("post_recv")?;
    drop(region);
    client.post_one(SendOp::Send, 0, 4)?;
    Ok(pair)
}

fn gone_sender<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    gone(setting)?.client.fails("the sender", ONE, CompletionStatus::REM_OP_ERR)
}

fn gone_receiver<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    gone(setting)?.server.fails("the receiver", 1, CompletionStatus::LOC_PROT_ERR)
}

/// Some devices refuse it when it is posted, others when it is used.
fn not_writable<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    let region = server.domain.register(64, Access::NONE).called("register")?;
    let local = Slice { region: &region, offset: 0, len: 64 };
    let told = match server.qp.post_recv(&[RecvRequest { id: 1, local }]) {
        Err(error) => format!("refused when posted: {}", error.error),
        Ok(()) => {
            client.post_one(SendOp::Send, 0, 4)?;
            let result = server.completion("the receiver")?.result.map_err(|error| error.status);
            match result {
                Ok(did) => return Err(Failure::wrong(format!("the receiver: {did:?}"))),
                Err(status) => format!("refused when used: {status:?}"),
            }
        }
    };
    equal("the bytes", read::<B>(&region, 0, 64)?, vec![0; 64])?;
    Ok(told)
}
