//! The requirements as readable pages.

use std::fmt::Write;

use conformance::requirements::{Difference, Level, Profile, Requirement, Requirements, Role};
use vector_check::Files;

use super::seen::Seen;

const AREAS: [(&str, &str); 10] = [
    ("CTRL", "Control messages"),
    ("FEAT", "Features"),
    ("MEM", "Windows"),
    ("XFER", "Transfer"),
    ("FLOW", "Flow control"),
    ("CONN", "Connection"),
    ("KEEP", "Keepalive"),
    ("CLOSE", "Close"),
    ("RES", "Resources"),
    ("SEC", "Security"),
];

/// The files of `spec` that are rendered, in Markdown.
pub fn pages(requirements: &Requirements, files: &Files) -> [(&'static str, String); 3] {
    [
        ("requirements.md", all(requirements)),
        ("differences.md", differences(requirements)),
        ("coverage.md", Seen::of(requirements, files).page()),
    ]
}

fn all(requirements: &Requirements) -> String {
    let mut page = String::from(
        "# Requirements\n\n\
         Rendered from [requirements.toml](requirements.toml) by `valkey-rdma-trust reqs render`; change that file.\n\
         [protocol.md](protocol.md) tells the same in order. What shows each must: [coverage.md](coverage.md).\n\n\
         **Wire contract**: a *must* of it is what two faultless peers need in order to lose no byte and not to wait for ever; a *should* or\n\
         *may* makes that cheaper, or leaves a choice. **Hardening profile**: everything else, that is, what keeps a peer that errs,\n\
         attacks, is slow or vanishes from costing more than its connection, and what a side does with its own resources.\n\n\
         | area | wire: must | should | may | hardened: must | should | may |\n|---|---:|---:|---:|---:|---:|---:|\n",
    );
    for (area, title) in AREAS {
        let counts = [Profile::Wire, Profile::Hardened].map(|profile| {
            let of = |one: &&Requirement| one.area() == area && one.profile == profile;
            let count = |level| requirements.iter().filter(of).filter(|one| one.level == level).count();
            let [must, should, may] = [Level::Must, Level::Should, Level::May].map(count);
            format!("{must} | {should} | {may}")
        });
        // As GitHub derives anchors from headings.
        let link = title.to_lowercase().replace(' ', "-");
        let _ = writeln!(page, "| [{title}](#{link}) | {} |", counts.join(" | "));
    }
    for (area, title) in AREAS {
        let _ = writeln!(page, "\n## {title}");
        for requirement in requirements.iter().filter(|requirement| requirement.area() == area) {
            add(&mut page, requirement);
        }
    }
    page
}

fn add(page: &mut String, requirement: &Requirement) {
    let Requirement { id, level, origin, profile, source, text, note, differs, roles, untestable, .. } =
        requirement;
    let whom = match roles[..] {
        [Role::Client] => ", clients",
        [Role::Server] => ", servers",
        _ => "",
    };
    let _ = write!(page, "\n### {id}\n**{level}**{whom} · {profile} · {origin}: {source}\n\n{text}\n");
    let differs = differs.as_ref().map(|one| format!("{} Deployed code: {}", one.document, one.code));
    for (title, more) in [("Note", note), ("The document", &differs), ("Not tested", untestable)] {
        if let Some(more) = more {
            let _ = write!(page, "\n> {title}: {more}\n");
        }
    }
}

fn differences(requirements: &Requirements) -> String {
    let mut page = String::from(
        "# The document and deployed code\n\n\
         Where Valkey's page about RDMA (\"the document\") and the programs that are deployed, Valkey 9.1.2, libvalkey 0.4.0 and 0.5.0, and valkey-go, differ,\n\
         or the page is silent. *Here* is what this specification requires, and what this implementation does. *Seen* names cases of\n\
         the suite, whose results for those programs are in [docs/reports](../docs/reports/README.md), and lines of their source.\n\n\
         Rendered from [requirements.toml](requirements.toml) by `valkey-rdma-trust reqs render`; change that file.\n",
    );
    for (area, title) in AREAS {
        let mut title = Some(title);
        for requirement in requirements.iter().filter(|requirement| requirement.area() == area) {
            let Requirement { id, level, profile, text, differs: Some(differs), .. } = requirement else {
                continue;
            };
            // No heading for an area without differences.
            if let Some(title) = title.take() {
                let _ = writeln!(page, "\n## {title}");
            }
            let Difference { document, code, cases, source } = differs;
            let cases = cases.iter().map(|case| format!("`{case}`, ")).collect::<String>();
            let _ = write!(
                page,
                "\n### {id}\n- **The document**: {document}\n- **Deployed code**: {code}\n\
                 - **Here** ({level}, {profile}): {text}\n- **Seen**: {cases}{source}\n"
            );
        }
    }
    page
}
