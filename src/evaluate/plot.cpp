// A small SVG writer.
#include "evaluate/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr double kWidth = 760.0;
constexpr double kHeight = 460.0;
constexpr double kLeft = 72.0;
constexpr double kRight = 24.0;
constexpr double kTop = 60.0;
constexpr double kBottom = 64.0;
constexpr double kDodge = 6.0;  // pixels between the bars of two series at one length
constexpr double kMarker = 4.5;

// Okabe and Ito's colours, which remain apart for colour-blind eyes.
constexpr std::array<std::string_view, 6> kColours{
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#555555"};

std::string escape(std::string_view text) {
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
      default:
        out += c;
    }
  }
  return out;
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, escape(text));
}

std::string line_between(double x1, double y1, double x2, double y2, std::string_view style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n",
                     x1,
                     y1,
                     x2,
                     y2,
                     style);
}

std::string marker_at(double x, double y, std::size_t number) {
  const std::string_view colour = kColours[number % kColours.size()];
  const auto polygon = [&](std::initializer_list<std::array<double, 2>> corners) {
    std::string points;
    for (const auto& [dx, dy] : corners) {
      points += fmt::format("{:.1f},{:.1f} ", x + dx * kMarker, y + dy * kMarker);
    }
    points.pop_back();
    return fmt::format("<polygon points=\"{}\" fill=\"{}\"/>\n", points, colour);
  };
  switch (number % 4) {
    case 0:
      return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>\n",
                         x,
                         y,
                         kMarker,
                         colour);
    case 1:
      return polygon({{-0.9, -0.9}, {0.9, -0.9}, {0.9, 0.9}, {-0.9, 0.9}});
    case 2:
      return polygon({{0.0, -1.2}, {1.1, 0.9}, {-1.1, 0.9}});
    default:
      return polygon({{0.0, -1.3}, {1.3, 0.0}, {0.0, 1.3}, {-1.3, 0.0}});
  }
}

// 1, 2 or 5 times a power of ten, so that about `wanted` steps fill the span.
double nice_step(double span, double wanted) {
  const double raw = span / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power * 1.0001) {
      return factor * power;
    }
  }
  return 10.0 * power;
}

class Axes {
 public:
  explicit Axes(const Plot& plot) {
    double least = std::numeric_limits<double>::infinity();
    double most = 0.0;
    double high = 0.0;
    for (const PlotSeries& series : plot.series) {
      for (const PlotPoint& point : series.points) {
        least = std::min(least, point.x);
        most = std::max(most, point.x);
        high = std::max({high, point.y, point.interval.high});
      }
    }
    BIFOCAL_REQUIRE(most > 0.0 && least > 0.0, "[plot] wanted points with a length, got none");
    is_log_ = most > 10.0 * least;
    y_step_ = nice_step(std::max(high, 0.01), 5.0);
    y_most_ = y_step_ * std::ceil(std::max(high, 0.01) / y_step_ - 1e-9);
    const double low = is_log_ ? std::log2(least) : 0.0;
    const double up = is_log_ ? std::log2(most) : most;
    const double margin = is_log_ ? 0.3 : 0.04 * most;
    x_low_ = is_log_ ? low - margin : 0.0;
    x_high_ = up + margin;
  }

  double x(double value) const {
    const double place = ((is_log_ ? std::log2(value) : value) - x_low_) / (x_high_ - x_low_);
    return kLeft + place * (kWidth - kLeft - kRight);
  }

  double y(double share) const {
    return kHeight - kBottom - share / y_most_ * (kHeight - kTop - kBottom);
  }

  std::string draw() const {
    const std::string grid = "stroke=\"#dddddd\"";
    const std::string frame = "stroke=\"#333333\"";
    std::string out;
    const int lines = static_cast<int>(std::lround(y_most_ / y_step_));
    for (int i = 0; i <= lines; ++i) {
      const double share = y_step_ * i;
      out += line_between(kLeft, y(share), kWidth - kRight, y(share), i == 0 ? frame : grid);
      out += text_at(kLeft - 8.0, y(share) + 4.0, "end", fmt::format("{:g} %", 100.0 * share));
    }
    for (const double tick : x_ticks()) {
      out += line_between(x(tick), kHeight - kBottom, x(tick), kHeight - kBottom + 5.0, frame);
      out += text_at(x(tick), kHeight - kBottom + 20.0, "middle", fmt::format("{:.0f}", tick));
    }
    return out + line_between(kLeft, kTop, kLeft, kHeight - kBottom, frame);
  }

 private:
  std::vector<double> x_ticks() const {
    std::vector<double> ticks;
    if (is_log_) {
      for (double exponent = std::ceil(x_low_); exponent <= x_high_; exponent += 1.0) {
        ticks.push_back(std::exp2(exponent));
      }
      return ticks;
    }
    const double step = std::max(1.0, nice_step(x_high_, 8.0));
    for (double tick = 0.0; tick <= x_high_; tick += step) {
      ticks.push_back(tick);
    }
    return ticks;
  }

  bool is_log_ = false;
  double x_low_ = 0.0;
  double x_high_ = 1.0;
  double y_step_ = 0.1;
  double y_most_ = 1.0;
};

std::string draw_series(const PlotSeries& series,
                        const Axes& axes,
                        std::size_t number,
                        std::size_t count) {
  const std::string stroke = fmt::format("stroke=\"{}\"", kColours[number % kColours.size()]);
  const double shift =
      kDodge * (static_cast<double>(number) - 0.5 * static_cast<double>(count - 1));
  std::string path;
  std::string marks;
  for (const PlotPoint& point : series.points) {
    const double x = axes.x(point.x) + shift;
    const double low = axes.y(point.interval.low);
    const double high = axes.y(point.interval.high);
    path += fmt::format("{:.1f},{:.1f} ", x, axes.y(point.y));
    marks += line_between(x, low, x, high, stroke + " stroke-width=\"1.5\"");
    for (const double end : {low, high}) {
      marks += line_between(x - 3.0, end, x + 3.0, end, stroke + " stroke-width=\"1.5\"");
    }
    marks += marker_at(x, axes.y(point.y), number);
  }
  path.pop_back();
  return fmt::format(
             "<polyline points=\"{}\" fill=\"none\" {} stroke-width=\"1.5\" "
             "stroke-opacity=\"0.6\"/>\n",
             path,
             stroke) +
         marks;
}

std::string draw_legend(const Plot& plot) {
  std::string out;
  double x = kLeft + 8.0;
  constexpr double kLetter = 7.2;  // widest mean width of a letter at 13 pixels
  for (std::size_t s = 0; s < plot.series.size(); ++s) {
    out += marker_at(x, kTop - 20.0, s);
    out += text_at(x + 10.0, kTop - 15.5, "start", plot.series[s].name);
    x += 34.0 + kLetter * static_cast<double>(plot.series[s].name.size());
  }
  return out;
}

}  // namespace

std::string plot_svg(const Plot& plot) {
  const Axes axes(plot);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
      kWidth,
      kHeight);
  svg +=
      fmt::format("<text x=\"{:.1f}\" y=\"22\" text-anchor=\"middle\" font-size=\"15\">{}</text>\n",
                  0.5 * kWidth,
                  escape(plot.title));
  svg += axes.draw();
  svg += text_at(0.5 * (kLeft + kWidth - kRight), kHeight - 18.0, "middle", plot.x_label);
  const double middle = 0.5 * (kTop + kHeight - kBottom);
  svg += fmt::format(
      "<text x=\"20\" y=\"{0:.1f}\" text-anchor=\"middle\" transform=\"rotate(-90 20 {0:.1f})\">{1}"
      "</text>\n",
      middle,
      escape(plot.y_label));
  for (std::size_t s = 0; s < plot.series.size(); ++s) {
    if (!plot.series[s].points.empty()) {
      svg += draw_series(plot.series[s], axes, s, plot.series.size());
    }
  }
  return svg + draw_legend(plot) + "</svg>\n";
}

}  // namespace bifocal
