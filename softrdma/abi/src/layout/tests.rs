//! Checks with a C compiler that the structures here match those of the installed headers.

use core::mem::{align_of, offset_of, size_of};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::*;

/// Returns assertions in C about structures: their sizes, alignments and field offsets. Fields of
/// unnamed unions are left out.
fn assertions() -> String {
    let mut text = String::from("#include <stddef.h>\n#include <rdma/rdma_cma.h>\n");
    macro_rules! same {
        ($($name:literal $type:ty { $($field:ident $(/ $theirs:ident)?),* })*) => {
            $(
                let _ = writeln!(text, "_Static_assert(sizeof(struct {0}) == {1}, \"size of {0}\");", $name, size_of::<$type>());
                let _ = writeln!(text, "_Static_assert(_Alignof(struct {0}) == {1}, \"alignment of {0}\");", $name, align_of::<$type>());
                $(
                    let field = same!(@ $field $($theirs)?);
                    let _ = writeln!(
                        text,
                        "_Static_assert(offsetof(struct {0}, {field}) == {1}, \"{0}.{field}\");",
                        $name,
                        offset_of!($type, $field)
                    );
                )*
            )*
        };
        (@ $field:ident $theirs:ident) => { stringify!($theirs) };
        (@ $field:ident) => { stringify!($field) };
    }
    same! {
        "ibv_device" Device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        "ibv_gid_entry" GidEntry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        "rdma_addrinfo" AddressInfo {
            flags / ai_flags, family / ai_family, qp_type / ai_qp_type, port_space / ai_port_space, src_len / ai_src_len,
            dst_len / ai_dst_len, src_addr / ai_src_addr, dst_addr / ai_dst_addr, src_canonname / ai_src_canonname,
            dst_canonname / ai_dst_canonname, route_len / ai_route_len, route / ai_route, connect_len / ai_connect_len,
            connect / ai_connect, next / ai_next
        }
        "ibv_context" ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        "ibv_context_ops" ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
        "ibv_pd" ibv_pd { context, handle }
        "ibv_mr" ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        "ibv_comp_channel" ibv_comp_channel { context, fd, refcnt }
        "ibv_cq" ibv_cq { context, channel, cq_context, handle, cqe }
        "ibv_qp" ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type }
        "ibv_qp_init_attr" ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        "ibv_qp_attr" ibv_qp_attr {
            qp_state, dest_qp_num, cap, ah_attr, max_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry
        }
        "ibv_wc" ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags }
        "ibv_send_wr" ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr }
        "ibv_recv_wr" ibv_recv_wr { wr_id, next, sg_list, num_sge }
        "ibv_sge" ibv_sge { addr, length, lkey }
        "ibv_async_event" ibv_async_event { element, event_type }
        "ibv_device_attr" ibv_device_attr { fw_ver, node_guid, max_qp, max_sge, max_cqe, atomic_cap, phys_port_cnt }
        "rdma_event_channel" rdma_event_channel { fd }
        "rdma_cm_id" rdma_cm_id {
            verbs, channel, context, qp, route, ps, port_num, event, send_cq_channel, send_cq, recv_cq_channel, recv_cq, srq,
            pd, qp_type
        }
        "rdma_cm_event" rdma_cm_event { id, listen_id, event, status, param }
        "rdma_conn_param" rdma_conn_param {
            private_data, private_data_len, responder_resources, initiator_depth, flow_control, retry_count,
            rnr_retry_count, srq, qp_num
        }
    }
    same! {
        "ibv_cq_init_attr_ex" QueueAttributes {
            cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain
        }
        "ibv_cq_ex" QueueEx {
            comp_mask, status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_vendor_err, read_byte_len,
            read_imm_data, read_qp_num, read_src_qp, read_wc_flags, read_slid, read_sl, read_dlid_path_bits,
            behind / read_completion_ts
        }
        "ibv_qp_init_attr_ex" PairAttributes {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, comp_mask, pd, xrcd, create_flags, max_tso_header,
            rwq_ind_tbl, rx_hash_conf, source_qpn, send_ops_flags
        }
        "ibv_ah" AddressHandle { context, pd, handle }
        "ibv_data_buf" Buffer { addr, length }
        "ibv_srq" SharedQueue { context, srq_context, pd, handle, mutex, cond, events_completed }
        "ibv_srq_attr" SharedLimits { max_wr, max_sge, srq_limit }
        "ibv_srq_init_attr" SharedAttributes { srq_context, attr }
    }
    // Later versions append fields to these structures, or put some in front.
    macro_rules! offsets {
        ($($name:literal $type:ty { $($field:ident $(/ $theirs:ident)?),* } from $from:expr, $start:literal;)*) => {
            $($(
                let field = offsets!(@ $field $($theirs)?);
                let offset = offset_of!($type, $field) - $from;
                let _ = writeln!(
                    text,
                    "_Static_assert(offsetof(struct {0}, {field}) - {1} == {offset}, \"{0}.{field}\");",
                    $name, $start
                );
            )*)*
        };
        (@ $field:ident $theirs:ident) => { stringify!($theirs) };
        (@ $field:ident) => { stringify!($field) };
    }
    offsets! {
        "ibv_qp_ex" PairEx {
            qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add, before / wr_bind_mw, wr_rdma_read, wr_rdma_write, wr_rdma_write_imm,
            wr_send, wr_send_imm, between / wr_send_inv, wr_set_ud_addr, wr_set_xrc_srqn, wr_set_inline_data, wr_set_inline_data_list, wr_set_sge,
            wr_set_sge_list, wr_start, wr_complete, wr_abort, wr_atomic_write
        } from 0, "0";
        "ibv_srq_init_attr_ex" SharedAttributesEx { srq_context, attr, comp_mask, srq_type, pd } from 0, "0";
        "ibv_device_attr_ex" DeviceEx { orig_attr, comp_mask, xrc_odp_caps, phys_port_cnt_ex } from 0, "0";
        "verbs_context" VerbsContext {
            before / query_port, create_cq_ex, private / priv, query_device_ex, between / ibv_destroy_flow, create_qp_ex,
            get_srq_num, create_srq_ex, behind / open_xrcd, sz, context
        } from offset_of!(VerbsContext, before), "offsetof(struct verbs_context, query_port)";
    }
    // `ibv_query_port` writes up to where later versions added fields.
    let _ = writeln!(
        text,
        "_Static_assert(offsetof(struct ibv_port_attr, port_cap_flags2) == {PORT_ATTRIBUTES}, \"ports\");\n\
         _Static_assert(offsetof(struct ibv_port_attr, link_layer) == {}, \"link_layer\");",
        offset_of!(PortAttributes, link_layer)
    );
    text
}

/// Compiles a text against the headers in a directory, or against the installed ones.
fn compile(text: &str, headers: Option<&Path>) -> std::io::Result<Output> {
    let mut command = Command::new("cc");
    command.args(["-fsyntax-only", "-x", "c", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    if let Some(headers) = headers {
        command.arg("-I").arg(headers);
    }
    let mut compiler = command.spawn()?;
    compiler.stdin.take().expect("is piped").write_all(text.as_bytes())?;
    compiler.wait_with_output()
}

fn compare(headers: Option<&Path>) {
    let whose = headers.map_or("installed".into(), |path| path.display().to_string());
    match compile("#include <rdma/rdma_cma.h>\n", headers) {
        Err(error) => println!("skipped: no C compiler ({error})"),
        Ok(output) if !output.status.success() => println!("skipped: no headers of rdma-core ({whose})"),
        Ok(_) => {
            let compiled = compile(&assertions(), headers).expect("it compiled before");
            let said = String::from_utf8_lossy(&compiled.stderr);
            assert!(compiled.status.success(), "{whose}: {said}");
            println!("compared: {whose}");
        }
    }
}

#[test]
fn structures_are_those_of_the_installed_headers() {
    compare(None);
}

/// Checks headers of other versions.
///
/// `RDMA_CORE_HEADERS` lists their directories, separated by colons, as `lab/run rdma-core-headers`
/// prints them.
#[test]
fn structures_are_those_of_other_versions() {
    match std::env::var_os("RDMA_CORE_HEADERS") {
        None => println!("skipped: RDMA_CORE_HEADERS names none; lab/run rdma-core-headers fetches some"),
        Some(directories) => {
            std::env::split_paths(&directories).for_each(|directory| compare(Some(&directory)));
        }
    }
}
