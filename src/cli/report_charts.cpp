// Line charts and heat maps in SVG.
#include "cli/report_charts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace bifocal {

namespace {

constexpr double kWidth = 440.0;
constexpr double kHeight = 220.0;
constexpr double kLeft = 46.0;
constexpr double kRight = 16.0;
constexpr double kTop = 10.0;
constexpr double kBottom = 24.0;
constexpr double kLogFrom = 20.0;      // ratio of values from which an axis is logarithmic
constexpr std::size_t kBuckets = 300;  // of a curve's points
constexpr std::size_t kColumns = 90;   // of a heat map
constexpr double kPalest = 0.06;       // opacity of a heat map's least value

// A range of values and their places in [0, 1].
class Scale {
 public:
  void take(double value) {
    if (std::isfinite(value)) {
      least_ = std::min(least_, value);
      most_ = std::max(most_, value);
    }
  }

  bool is_empty() const { return least_ > most_; }

  // Decides between linear and logarithmic; a range of one value is widened.
  void settle(bool may_be_log) {
    is_log_ = may_be_log && least_ > 0.0 && most_ > kLogFrom * least_;
    if (most_ == least_) {
      const double margin = least_ == 0.0 ? 1.0 : 0.1 * std::abs(least_);
      least_ -= margin;
      most_ += margin;
    }
  }

  // Room at both ends of a linear range; zero stays an end.
  void widen() {
    const double margin = 0.04 * (most_ - least_);
    if (!is_log_) {
      least_ = least_ >= 0.0 && least_ < margin ? least_ : least_ - margin;
      most_ += margin;
    }
  }

  double place(double value) const {
    return is_log_ ? std::log(value / least_) / std::log(most_ / least_)
                   : (value - least_) / (most_ - least_);
  }

  double least() const { return least_; }

  double most() const { return most_; }

  bool is_log() const { return is_log_; }

  std::vector<double> ticks(double wanted) const { return is_log_ ? log_ticks() : steps(wanted); }

 private:
  // 1, 2 or 5 times a power of ten, about `wanted` of them.
  std::vector<double> steps(double wanted) const {
    const double raw = (most_ - least_) / wanted;
    const double power = std::pow(10.0, std::floor(std::log10(raw)));
    double step = 10.0 * power;
    for (const double factor : {5.0, 2.0, 1.0}) {
      step = raw <= factor * power ? factor * power : step;
    }
    std::vector<double> ticks;
    const auto first = static_cast<std::int64_t>(std::ceil(least_ / step - 1e-9));
    const auto last = static_cast<std::int64_t>(std::floor(most_ / step + 1e-9));
    for (std::int64_t i = first; i <= last; ++i) {
      ticks.push_back(static_cast<double>(i) * step);
    }
    return ticks;
  }

  std::vector<double> log_ticks() const {
    const auto first = static_cast<int>(std::floor(std::log10(least_)));
    const auto last = static_cast<int>(std::ceil(std::log10(most_)));
    const int stride = std::max(1, (last - first) / 5);
    std::vector<double> ticks;
    for (int power = first; power <= last; power += stride) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double tick = factor * std::pow(10.0, power);
        const bool fits = tick >= least_ * (1.0 - 1e-9) && tick <= most_ * (1.0 + 1e-9);
        if (fits && (factor == 1.0 || last - first <= 2)) {
          ticks.push_back(tick);
        }
      }
    }
    return ticks;
  }

  double least_ = std::numeric_limits<double>::infinity();
  double most_ = -std::numeric_limits<double>::infinity();
  bool is_log_ = false;
};

double x_at(double place) {
  return kLeft + place * (kWidth - kLeft - kRight);
}

double y_at(double place) {
  return kHeight - kBottom - place * (kHeight - kTop - kBottom);
}

std::string line_between(double x1, double y1, double x2, double y2, std::string_view kind) {
  return fmt::format(R"(<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>)",
                     kind,
                     x1,
                     y1,
                     x2,
                     y2);
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format(
      R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>)", x, y, anchor, escape_html(text));
}

std::string y_axis(const Scale& y) {
  std::string out;
  for (const double tick : y.ticks(4.0)) {
    const double at = y_at(y.place(tick));
    out += line_between(kLeft, at, kWidth - kRight, at, "grid");
    out += text_at(kLeft - 5.0, at + 3.5, "end", short_number(tick));
  }
  return out;
}

std::string x_axis(const Scale& x, const std::vector<std::string>& words) {
  std::string out = line_between(kLeft, y_at(0.0), kWidth - kRight, y_at(0.0), "axis");
  const std::size_t stride = words.size() / 8 + 1;
  for (std::size_t i = 0; i < words.size(); i += stride) {
    out += text_at(
        x_at(x.place(static_cast<double>(i))), kHeight - kBottom + 14.0, "middle", words[i]);
  }
  if (words.empty()) {
    for (const double tick : x.ticks(5.0)) {
      const double at = x_at(x.place(tick));
      out += line_between(at, y_at(0.0), at, y_at(0.0) + 3.0, "axis");
      out += text_at(at, kHeight - kBottom + 14.0, "middle", short_number(tick));
    }
  }
  return out;
}

// Of many points the least and the most of each bucket, in their order: spikes stay visible.
std::vector<std::pair<double, double>> thin_out(
    const std::vector<std::pair<double, double>>& points) {
  if (points.size() <= 2 * kBuckets) {
    return points;
  }
  std::vector<std::pair<double, double>> kept;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    const auto begin =
        points.begin() + static_cast<std::ptrdiff_t>(points.size() * bucket / kBuckets);
    const auto end =
        points.begin() + static_cast<std::ptrdiff_t>(points.size() * (bucket + 1) / kBuckets);
    // NaN is neither least nor most, unless all are.
    const auto below = [](const auto& a, const auto& b) {
      return std::isnan(b.second) ? !std::isnan(a.second) : a.second < b.second;
    };
    const auto above = [](const auto& a, const auto& b) {
      return std::isnan(b.second) ? !std::isnan(a.second) : a.second > b.second;
    };
    const auto low = std::min_element(begin, end, below);
    const auto high = std::min_element(begin, end, above);
    kept.push_back(std::min(low, high) == low ? *low : *high);
    if (low != high) {
      kept.push_back(std::min(low, high) == low ? *high : *low);
    }
  }
  return kept;
}

std::string path_of(const Curve& curve, const Scale& x, const Scale& y, std::size_t number) {
  std::string path;
  std::string dots;
  bool is_down = false;
  for (const auto& [at, value] : thin_out(curve.points)) {
    if (!std::isfinite(value)) {
      is_down = false;
      continue;
    }
    const double px = x_at(x.place(at));
    const double py = y_at(y.place(value));
    path += fmt::format("{}{:.1f},{:.1f}", is_down ? "L" : "M", px, py);
    is_down = true;
    if (curve.points.size() <= 40) {
      dots += fmt::format(
          R"(<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}: {}</title></circle>)",
          number,
          px,
          py,
          escape_html(curve.name),
          short_number(value));
    }
  }
  return fmt::format(R"(<path class="curve c{}" d="{}"/>)", number, path) + dots;
}

std::string panel(std::string_view title,
                  std::string_view legend,
                  std::string_view drawing,
                  std::string_view note) {
  std::string out = fmt::format(
      "<figure><figcaption>{}{}</figcaption>\n"
      R"(<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>)",
      escape_html(title),
      legend,
      kWidth,
      kHeight,
      escape_html(title),
      drawing);
  if (!note.empty()) {
    out += fmt::format("\n<p class=\"note\">{}</p>", escape_html(note));
  }
  return out + "</figure>\n";
}

// Averages neighbours until there are few enough.
std::vector<std::pair<double, std::vector<double>>> merge_columns(const HeatMap& map) {
  const std::size_t have = map.columns.size();
  const std::size_t want = std::min(have, kColumns);
  std::vector<std::pair<double, std::vector<double>>> merged;
  for (std::size_t column = 0; column < want; ++column) {
    const std::size_t begin = have * column / want;
    const std::size_t end = have * (column + 1) / want;
    std::vector<double> sums;
    std::vector<double> counts;
    for (std::size_t i = begin; i < end; ++i) {
      const std::vector<double>& values = map.columns[i].second;
      sums.resize(std::max(sums.size(), values.size()));
      counts.resize(sums.size());
      for (std::size_t row = 0; row < values.size(); ++row) {
        if (std::isfinite(values[row])) {
          sums[row] += values[row];
          counts[row] += 1.0;
        }
      }
    }
    for (std::size_t row = 0; row < sums.size(); ++row) {
      sums[row] /= counts[row];  // NaN where nothing was
    }
    merged.emplace_back(map.columns[begin].first, std::move(sums));
  }
  return merged;
}

std::string cell(double x, double y, double width, double height, double opacity, double value) {
  return fmt::format(
      R"(<rect class="cell" x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.2f}" fill-opacity="{:.3f}">)"
      "<title>{}</title></rect>",
      x,
      y,
      width,
      height,
      opacity,
      short_number(value));
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string short_number(double value) {
  if (!std::isfinite(value)) {
    return "-";
  }
  for (const auto& [unit, name] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (std::abs(value) >= 0.9995 * unit) {
      return fmt::format("{:.3g}{}", value / unit, name);
    }
  }
  return fmt::format("{:.3g}", value);
}

std::string draw(const LineChart& chart) {
  Scale x;
  Scale y;
  for (const Curve& curve : chart.curves) {
    for (const auto& [at, value] : curve.points) {
      if (std::isfinite(value)) {
        x.take(at);
        y.take(value);
      }
    }
  }
  if (y.is_empty()) {
    return "";
  }
  x.settle(false);
  y.settle(true);
  y.widen();
  std::string drawing = y_axis(y) + x_axis(x, chart.x_words);
  for (const double mark : chart.marks) {
    if (mark > x.least() && mark < x.most()) {
      drawing += line_between(x_at(x.place(mark)), kTop, x_at(x.place(mark)), y_at(0.0), "mark");
    }
  }
  std::string legend;
  for (std::size_t i = 0; i < chart.curves.size(); ++i) {
    drawing += path_of(chart.curves[i], x, y, i);
    if (chart.curves.size() > 1) {
      legend +=
          fmt::format(R"( <span class="key c{}">{}</span>)", i, escape_html(chart.curves[i].name));
    }
  }
  return panel(chart.title, legend, drawing, chart.note);
}

std::string draw(const HeatMap& map) {
  const auto columns = merge_columns(map);
  Scale values;
  std::size_t rows = 0;
  for (const auto& [at, column] : columns) {
    rows = std::max(rows, column.size());
    std::ranges::for_each(column, [&](double value) { values.take(value); });
  }
  if (values.is_empty()) {
    return "";
  }
  const double least = values.least();
  const double most = values.most();
  values.settle(true);
  const double width = (kWidth - kLeft - kRight) / static_cast<double>(columns.size());
  const double height = (kHeight - kTop - kBottom) / static_cast<double>(rows);
  std::string drawing;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    for (std::size_t row = 0; row < columns[i].second.size(); ++row) {
      const double value = columns[i].second[row];
      if (std::isfinite(value)) {
        drawing += cell(kLeft + width * static_cast<double>(i),
                        y_at(0.0) - height * static_cast<double>(row + 1),
                        width,
                        height,
                        kPalest + (1.0 - kPalest) * values.place(value),
                        value);
      }
    }
  }
  const std::size_t stride = rows / 6 + 1;
  for (std::size_t row = 0; row < rows; row += stride) {
    const double middle = y_at(0.0) - height * (static_cast<double>(row) + 0.5);
    drawing += text_at(kLeft - 5.0, middle + 3.5, "end", fmt::format("{}", row));
  }
  const std::size_t step = columns.size() / 6 + 1;
  for (std::size_t i = 0; i < columns.size(); i += step) {
    drawing += text_at(kLeft + width * (static_cast<double>(i) + 0.5),
                       kHeight - kBottom + 14.0,
                       "middle",
                       short_number(columns[i].first));
  }
  const std::string legend =
      fmt::format(R"( <span class="scale">{} <i class="ramp"></i> {}{}</span>)",
                  short_number(least),
                  short_number(most),
                  values.is_log() ? ", log" : "");
  return panel(map.title, legend, drawing, map.note);
}

}  // namespace bifocal
