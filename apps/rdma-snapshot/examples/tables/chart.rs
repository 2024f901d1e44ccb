//! The chart, and the table of raw data.

use std::collections::BTreeSet;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::{Failure, Figure, Kind, Part};

/// The series of a figure.
type Value = fn(&Figure) -> f64;

/// Returns the median, the minimum and the maximum of a kind's rounds.
fn middle(figures: &[Figure], part: Part, kind: Kind, replicas: usize, value: Value) -> Option<[f64; 3]> {
    let of = |figure: &&Figure| (figure.part, figure.kind, figure.replicas) == (part, kind, replicas);
    let mut values: Vec<_> = figures.iter().filter(of).map(value).collect();
    values.sort_by(f64::total_cmp);
    Some([*values.get(values.len() / 2)?, *values.first()?, *values.last()?])
}

fn name(kind: Kind) -> String {
    serde_json::to_value(kind).ok().and_then(|name| name.as_str().map(String::from)).unwrap_or_default()
}

/// Prints a table for each part.
pub(crate) fn table(figures: &[Figure]) {
    for part in [Part::Whole, Part::Moving] {
        println!(
            "\n{part:?}:\n\n| kind | replicas | s | MB/s to each | source, processor s | machine, processor s |"
        );
        println!("|---|--:|--:|--:|--:|--:|");
        for kind in part.kinds() {
            let counts: BTreeSet<_> = figures.iter().map(|figure| figure.replicas).collect();
            for replicas in counts {
                let value = |value: Value| middle(figures, part, *kind, replicas, value);
                let shown = |value: Option<[f64; 3]>, digits: usize| {
                    let [median, least, most] = value?;
                    let range = format!("{median:.digits$} ({least:.digits$}–{most:.digits$})");
                    Some(if least < most { range } else { format!("{median:.digits$}") })
                };
                let cells = [
                    shown(value(|figure| figure.measured.seconds), 2),
                    shown(value(|figure| figure.bytes as f64 / 1e6 / figure.measured.seconds), 0),
                    shown(value(|figure| figure.measured.source_seconds), 2),
                    shown(value(|figure| figure.machine_seconds), 1),
                ];
                if let [Some(seconds), Some(rate), Some(source), Some(machine)] = cells {
                    println!("| {} | {replicas} | {seconds} | {rate} | {source} | {machine} |", name(*kind));
                }
            }
        }
    }
}

/// Draws the medians, with lines from the minimum to the maximum: one group of bars for each number
/// of replicas.
pub(crate) fn draw(figures: &[Figure], title: &str, into: &Path) -> Result<(), Failure> {
    let mib = figures.first().map_or(0, |figure| figure.bytes >> 20);
    let area = SVGBackend::new(into, (1200, 860)).into_drawing_area();
    area.fill(&WHITE)?;
    let panels: [(Part, &str, Value); 4] = [
        (Part::Whole, "Valkey to Valkeys: seconds", |figure| figure.measured.seconds),
        (Part::Whole, "Valkey to Valkeys: processor seconds of the source", |figure| {
            figure.measured.source_seconds
        }),
        (Part::Moving, "memory to memory: seconds", |figure| figure.measured.seconds),
        (Part::Moving, "memory to memory: processor seconds of the source", |figure| {
            figure.measured.source_seconds
        }),
    ];
    for (area, (part, what, value)) in area.split_evenly((2, 2)).iter().zip(panels) {
        panel(area, figures, part, &format!("{title}, {mib} MiB, {what}"), value)?;
    }
    area.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    figures: &[Figure],
    part: Part,
    caption: &str,
    value: Value,
) -> Result<(), Failure> {
    let most = figures.iter().filter(|figure| figure.part == part).map(value).fold(0.01, f64::max);
    let kinds = part.kinds();
    let width = kinds.len() as f64 + 1.0;
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 17))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..width * 3.0, 0.0..most * 1.05)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .x_desc("one, two, three replicas")
        .y_desc("s")
        .draw()?;
    for (place, kind) in kinds.iter().enumerate() {
        let color = Palette99::pick(place).to_rgba();
        let bars: Vec<_> = (1..=3_usize)
            .filter_map(|replicas| Some((replicas, middle(figures, part, *kind, replicas, value)?)))
            .map(|(replicas, values)| ((replicas - 1) as f64 * width + place as f64 + 0.6, values))
            .collect();
        let bar = |(left, [median, ..]): &(f64, [f64; 3])| {
            Rectangle::new([(*left, 0.0), (left + 0.8, *median)], color.filled())
        };
        chart
            .draw_series(bars.iter().map(bar))?
            .label(name(*kind))
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
        let range = |(left, [_, least, most]): &(f64, [f64; 3])| {
            PathElement::new([(left + 0.4, *least), (left + 0.4, *most)], BLACK)
        };
        chart.draw_series(bars.iter().map(range))?;
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).border_style(BLACK).draw()?;
    Ok(())
}
