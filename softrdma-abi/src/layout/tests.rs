//! Whether the structures here are those of the installed headers, which a C compiler says.

use core::mem::{align_of, offset_of, size_of};
use std::fmt::Write as _;
use std::process::Command;

use super::*;

/// Assertions in C about structures: their sizes, alignments, and where their fields are. Fields of unnamed unions are not
/// named here.
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
    // What `ibv_query_port` writes ends where later versions went on.
    let _ = writeln!(
        text,
        "_Static_assert(offsetof(struct ibv_port_attr, port_cap_flags2) == {PORT_ATTRIBUTES}, \"ports\");\n\
         _Static_assert(offsetof(struct ibv_port_attr, link_layer) == {}, \"link_layer\");",
        offset_of!(PortAttributes, link_layer)
    );
    text
}

#[test]
fn structures_are_those_of_the_installed_headers() {
    let file = std::env::temp_dir().join(format!("softrdma-layout-{}.c", std::process::id()));
    let compile = |text: &str| {
        std::fs::write(&file, text).expect("a temporary file");
        Command::new("cc").args(["-fsyntax-only", "-x", "c"]).arg(&file).output()
    };
    let headers = compile("#include <rdma/rdma_cma.h>\n");
    let compiled = compile(&assertions());
    let _gone = std::fs::remove_file(&file);
    match headers {
        Err(error) => println!("skipped: no C compiler ({error})"),
        Ok(output) if !output.status.success() => println!("skipped: rdma-core's headers are not installed"),
        Ok(_) => {
            let compiled = compiled.expect("it compiled before");
            assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        }
    }
}
