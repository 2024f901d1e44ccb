//! Draws the measurements: one panel for each kind of figure, over the same time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::figures::{self, Line};

const WIDTH: u32 = 1100;
const PANEL: u32 = 210;
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(90, 90, 90),
    RGBColor(140, 86, 75),
    RGBColor(23, 190, 207),
];

/// Arguments of `chart`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// The logs of the two sides.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Where to draw it, as SVG.
    #[arg(short, long)]
    output: PathBuf,
}

pub(super) fn run(arguments: &Arguments) -> ExitCode {
    let lines = match figures::read(&arguments.files) {
        Ok(lines) => lines,
        Err(error) => return super::cannot_run(error),
    };
    let drawn = draw(&lines).and_then(|svg| Ok(std::fs::write(&arguments.output, svg)?));
    match drawn {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => super::cannot_run(error),
    }
}

type ChartResult<T> = Result<T, Box<dyn std::error::Error>>;

struct Panel {
    title: &'static str,
    /// Names and points (minutes, value).
    curves: BTreeMap<String, Vec<(f64, f64)>>,
    logarithmic: bool,
}

impl Panel {
    const fn new(title: &'static str) -> Self {
        Self { title, curves: BTreeMap::new(), logarithmic: false }
    }

    fn add(&mut self, curve: &str, minute: f64, value: f64) {
        self.curves.entry(curve.into()).or_default().push((minute, value));
    }
}

struct FaultPeriod {
    from: f64,
    to: f64,
    colour: RGBAColor,
}

pub(super) fn draw(lines: &[Line]) -> ChartResult<String> {
    let at = |line: &Line| match line {
        // A line is about the interval that ends there.
        Line::Clients(figures) => figures.at - figures.seconds,
        Line::Server { at, .. } | Line::Fault { at, .. } | Line::Verdict { at, .. } => *at,
    };
    let begin = lines.iter().map(at).fold(f64::INFINITY, f64::min);
    let end = lines.iter().map(at).fold(f64::NEG_INFINITY, f64::max);
    if lines.is_empty() || end <= begin {
        return Err("there is nothing to draw".into());
    }
    let minutes = |at: f64| (at - begin) / 60.0;
    let panels = panels(lines, &minutes);
    let periods = periods(lines, &minutes, minutes(end));
    let mut svg = String::new();
    {
        // In a block: the drawing borrows the text until it is dropped.
        let size = (WIDTH, PANEL * u32::try_from(panels.len())? + 60);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, below) = root.split_vertically(60);
        legend(&head)?;
        for (area, panel) in below.split_evenly((panels.len(), 1)).iter().zip(&panels) {
            draw_panel(area, panel, &periods, minutes(end))?;
        }
        root.present()?;
    }
    Ok(svg)
}

fn panels(lines: &[Line], minutes: &impl Fn(f64) -> f64) -> Vec<Panel> {
    let mut operations = Panel::new("operations a second, all compared");
    let mut bytes = Panel::new("MiB a second");
    let mut latency = Panel::new("an exchange, ms (logarithmic)");
    latency.logarithmic = true;
    let mut connections = Panel::new("connections, a minute");
    let mut device = Panel::new("clients' device: repeated and refused packets, a second");
    let mut memory = Panel::new("resident memory, MiB");
    let mut held = Panel::new("descriptors; objects of the clients' device");
    for line in lines {
        match line {
            Line::Clients(figures) => {
                // A point represents the interval before it. Its length is rounded to
                // tenths, so that a short last one may have none.
                let (minute, seconds) =
                    (minutes(figures.at - figures.seconds / 2.0), figures.seconds.max(0.1));
                let each = |count: u64| count as f64 / seconds;
                let mib = |count: u64| each(count) / f64::from(1 << 20);
                operations.add("operations", minute, each(figures.operations));
                bytes.add("sent", minute, mib(figures.bytes_sent));
                bytes.add("received", minute, mib(figures.bytes_received));
                // An interval without operations has no latencies.
                if figures.operations > 0 {
                    for (name, micros) in
                        [("p50", figures.p50), ("p99", figures.p99), ("longest", figures.max)]
                    {
                        latency.add(name, minute, micros as f64 / 1e3);
                    }
                }
                for (name, count) in
                    [("made", figures.connected), ("not made", figures.refused), ("lost", figures.lost)]
                {
                    connections.add(name, minute, each(count) * 60.0);
                }
                // As rxe names them (rxe_hw_counters.c in Linux).
                for name in ["completer_retry_err", "duplicate_request", "out_of_seq_request", "rcvd_seq_err"]
                {
                    if let Some(count) = figures.device.get(name) {
                        device.add(name, minute, each(*count));
                    }
                }
                memory.add("clients", minute, figures.process.resident_kib as f64 / 1024.0);
                held.add("clients: descriptors", minute, figures.process.descriptors as f64);
                for (name, count) in &figures.objects {
                    if ["qp", "mr", "cm_id"].contains(&name.as_str()) {
                        held.add(name, minute, *count as f64);
                    }
                }
            }
            Line::Server { at, name, process } => {
                memory.add(name, minutes(*at), process.resident_kib as f64 / 1024.0);
                held.add(&format!("{name}: descriptors"), minutes(*at), process.descriptors as f64);
            }
            Line::Fault { .. } | Line::Verdict { .. } => {}
        }
    }
    vec![operations, bytes, latency, connections, device, memory, held]
}

fn periods(lines: &[Line], minutes: &impl Fn(f64) -> f64, end: f64) -> Vec<FaultPeriod> {
    let mut periods = Vec::new();
    for one in ["clients", "servers"] {
        let faults: Vec<_> = lines
            .iter()
            .filter_map(|line| match line {
                Line::Fault { at, side, what } if side == one => Some((minutes(*at), what.as_str())),
                _ => None,
            })
            .collect();
        for (number, (from, what)) in faults.iter().enumerate() {
            // A kill is a moment. It does not end the present fault of the network.
            if what.ends_with("killed") {
                periods.push(FaultPeriod { from: *from, to: *from, colour: RED.mix(0.5) });
                continue;
            }
            let ends = faults[number + 1..].iter().find(|(_, what)| !what.ends_with("killed"));
            let to = ends.map_or(end, |(to, _)| *to);
            if let Some(colour) = colour(what) {
                periods.push(FaultPeriod { from: *from, to, colour });
            }
        }
    }
    periods
}

fn colour(fault: &str) -> Option<RGBAColor> {
    // The first words in `faults::ALL`.
    match fault.split(' ').next() {
        Some("loss") => Some(RGBColor(255, 127, 14).mix(0.18)),
        Some("outage") => Some(BLACK.mix(0.28)),
        Some("delay" | "reordered") => Some(RGBColor(31, 119, 180).mix(0.13)),
        Some("doubled" | "corrupted") => Some(RGBColor(44, 160, 44).mix(0.14)),
        _ => None,
    }
}

fn legend(area: &DrawingArea<SVGBackend<'_>, Shift>) -> ChartResult<()> {
    let style = ("sans-serif", 14).into_font().color(&BLACK);
    area.draw(&Text::new("Faults, of either direction:", (20, 12), style.clone()))?;
    let mut left = 230;
    for (name, fault) in [
        ("loss", "loss"),
        ("delay, reordering", "delay"),
        ("doubled, corrupted", "doubled"),
        ("nothing gets through", "outage"),
    ] {
        if let Some(colour) = colour(fault) {
            area.draw(&Rectangle::new([(left, 10), (left + 24, 26)], colour.filled()))?;
        }
        area.draw(&Text::new(name, (left + 32, 12), style.clone()))?;
        left += 180;
    }
    area.draw(&PathElement::new([(20, 36), (20, 52)], RED.mix(0.5)))?;
    area.draw(&Text::new("a process is killed; time in minutes", (32, 38), style))?;
    Ok(())
}

fn draw_panel<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    panel: &Panel,
    periods: &[FaultPeriod],
    end: f64,
) -> ChartResult<()> {
    let all = || panel.curves.values().flatten().map(|(_, value)| *value);
    let most = all().fold(1.0, f64::max) * 1.1;
    // Room on the right for the names of the curves.
    let width = 1.25 * end;
    let mut chart = ChartBuilder::on(area);
    chart.caption(panel.title, ("sans-serif", 15)).margin(6).margin_right(12);
    chart.x_label_area_size(22).y_label_area_size(64);
    if panel.logarithmic {
        // A logarithmic axis has no zero.
        let least = all().fold(most, f64::min).max(0.01);
        curves(chart.build_cartesian_2d(0.0..width, (least..most).log_scale())?, panel, periods, least..most)
    } else {
        curves(chart.build_cartesian_2d(0.0..width, 0.0..most)?, panel, periods, 0.0..most)
    }
}

fn curves<'a, Y>(
    mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<plotters::coord::types::RangedCoordf64, Y>>,
    panel: &Panel,
    periods: &[FaultPeriod],
    values: std::ops::Range<f64>,
) -> ChartResult<()>
where
    Y: plotters::coord::ranged1d::Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    chart.configure_mesh().light_line_style(TRANSPARENT).y_labels(6).x_labels(13).draw()?;
    for FaultPeriod { from, to, colour } in periods {
        let corners = [(*from, values.start), (*to, values.end)];
        if from < to {
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        } else {
            chart.draw_series([PathElement::new(corners, *colour)])?;
        }
    }
    for ((name, points), colour) in panel.curves.iter().zip(COLOURS.iter().cycle()) {
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}
